"""How a decoder layer joins attention, feed-forward layer and norms: one file each."""
