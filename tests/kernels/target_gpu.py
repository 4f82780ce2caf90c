"""Tells for which GPU kernels are compiled on a machine without one, as the command line of compile_for_gpu says it."""

from __future__ import annotations

import sys

import torch

IS_AMD = "gfx942" in sys.argv[1:]


def zeros(*shape: int) -> torch.Tensor:
    """In bf16."""
    return torch.zeros(*shape, dtype=torch.bfloat16)
