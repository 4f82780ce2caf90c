"""The seam to Ray Serve: arguments, resources, HAProxy, stores, request routing."""
