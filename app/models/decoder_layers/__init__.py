"""Joins attention, feed-forward layer and norms to a decoder layer: one file for each way."""
