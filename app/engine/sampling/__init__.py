"""Sampling: logits to tokens."""
