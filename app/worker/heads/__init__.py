"""Heads of a step: what becomes of its hidden states."""
