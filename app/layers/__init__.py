"""The layers models are made of; each knows its share of a tensor-parallel group."""
