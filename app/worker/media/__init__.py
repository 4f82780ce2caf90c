"""Pictures in a step: they are encoded before the first tokens that stand for them, and kept for others."""
