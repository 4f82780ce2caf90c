"""Model directories as they lie on disk: config.json, GGUF, headers, hubs. No torch (I8)."""
