"""A product for each head with a matrix of its own, in plain PyTorch."""

from __future__ import annotations

import torch


def head_products(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    """out [T, H, N] = x [T, H, K] times weight [H, K, N], head by head; whatever their strides."""
    torch.bmm(x.transpose(0, 1), weight, out=out.transpose(0, 1))
