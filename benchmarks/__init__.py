"""Benchmarks of the engine, the kernels and the whole graph; each prints one table and writes JSON."""
