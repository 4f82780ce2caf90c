"""The HTTP application, and the routes about the server itself."""
