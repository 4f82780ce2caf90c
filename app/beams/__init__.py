"""Beam search over any engine that generates."""
