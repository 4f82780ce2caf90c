"""Low-rank adapters of a worker: where they lie, which row has which, what layers add."""
