"""From a checkpoint to a model in memory: load formats, quantized modules, updates in place."""
