"""Decode steps over static tensors: their inputs, the step, its CUDA graphs, their start-up."""
