"""The plain products of PyTorch: the truth, and what runs where there is nothing faster."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from app.kernels.fused.reference import silu_and_mul
from app.kernels.gemm import LinearOps


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x [T, K] times weight [N, K], transposed, plus bias [N]: [T, N]."""
    return F.linear(x, weight, bias)


def gated_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Gate and up side by side in weight [2 N, K]: silu(x gate^T) * (x up^T), [T, N]."""
    return silu_and_mul(linear(x, weight, bias))


OPS = LinearOps(linear=linear, linear_parts=linear, gated_linear=gated_linear)
