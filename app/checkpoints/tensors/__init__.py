"""Tensors of checkpoints: their names, views and leaves, and the threads that read them."""
