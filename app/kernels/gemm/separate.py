"""Products of packed weights whose kernel makes one alone: what follows is another launch."""

from __future__ import annotations

import torch

from app.kernels.fused import GatedActivation, fused_ops
from app.kernels.gemm import Activations, GatedRows, Inputs, LinearOps, PackedWeight, materialize


def linear(x: Inputs, weight: PackedWeight, bias: torch.Tensor | None) -> torch.Tensor:
    """The same as `reference.linear`."""
    return weight.linear(materialize(x), bias)


def gated_linear(
    x: Activations, weight: PackedWeight, bias: torch.Tensor | None, activation: GatedActivation
) -> torch.Tensor:
    """The same as `reference.gated_linear`."""
    out = linear(x, weight, bias)
    return fused_ops(out.device).act_and_mul(out, activation)


def linear_add_norm(
    x: GatedRows,
    weight: PackedWeight,
    bias: torch.Tensor | None,
    residual: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    may_defer: bool,
) -> tuple[Activations, torch.Tensor]:
    """The same as `reference.linear_add_norm`."""
    return fused_ops(x.device).add_rms_norm(linear(x, weight, bias), residual, norm_weight, eps)


OPS = LinearOps(linear=linear, gated_linear=gated_linear, linear_add_norm=linear_add_norm)
