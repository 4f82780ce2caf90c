"""Decides which ranks share what: tensor-parallel and pipeline-parallel groups."""
