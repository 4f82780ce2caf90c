"""The plain products of PyTorch: the truth, and what runs where there is nothing faster."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from app.kernels.fused.reference import act_and_mul, add_rms_norm
from app.kernels.gemm import Inputs, materialize
from app.kernels.gemm.composed import composed


def linear(x: Inputs, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x [T, K] times weight [N, K], transposed, plus bias [N]: [T, N]."""
    return F.linear(materialize(x), weight, bias)


OPS = composed(linear, act_and_mul, add_rms_norm)
