"""Warm-up: what a start launches before the first request."""
