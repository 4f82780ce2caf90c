"""Keeps what tenants leave on the server: one bounded store, wherever it lives."""
