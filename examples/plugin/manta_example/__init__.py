"""One plugin of each kind for Manta."""
