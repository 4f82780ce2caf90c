"""The host-memory tier of the KV cache on one rank: its pool, and the copies to and from it."""
