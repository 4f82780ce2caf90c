"""What tenants keep on the server: one bounded store, wherever it lives."""
