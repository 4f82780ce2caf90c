"""Layers of experts: a gate, experts whose weights are stacked, and what every token goes through beside them."""
