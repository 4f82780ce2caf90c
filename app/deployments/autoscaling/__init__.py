"""How many replicas each model has: the arithmetic (`policy`), and the form in which Serve asks for it."""
