"""The adapters of one engine: what it knows of them, and how they come into the workers' memory."""
