"""The operator's routes: they act on all replicas of a model, at a listener and with keys of their own."""
