"""The Router: which replica shall take a request."""
