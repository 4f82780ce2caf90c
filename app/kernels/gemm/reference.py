"""The plain products of PyTorch: the truth, and what runs where there is nothing faster."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from app.kernels.fused import GatedActivation
from app.kernels.fused.reference import act_and_mul, add_rms_norm
from app.kernels.gemm import Activations, GatedRows, Inputs, LinearOps, materialize


def linear(x: Inputs, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x [T, K] times weight [N, K], transposed, plus bias [N]: [T, N]."""
    return F.linear(materialize(x), weight, bias)


def gated_linear(
    x: Activations, weight: torch.Tensor, bias: torch.Tensor | None, activation: GatedActivation
) -> torch.Tensor:
    """Gate and up side by side in weight [2 N, K]: silu(x gate^T) * (x up^T), [T, N]."""
    return act_and_mul(linear(x, weight, bias), activation)


def linear_add_norm(
    x: GatedRows,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    may_defer: bool,
) -> tuple[Activations, torch.Tensor]:
    """(the norm of x W^T + bias + residual, that sum), both [T, N]; the norm is never deferred."""
    return add_rms_norm(F.linear(materialize(x), weight, bias), residual, norm_weight, eps)


OPS = LinearOps(linear=linear, gated_linear=gated_linear, linear_add_norm=linear_add_norm)
