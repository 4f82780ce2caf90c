"""Readers of other servers' files: Ray Serve LLM's configuration, tokenizers of other forms."""
