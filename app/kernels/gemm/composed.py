"""Products of which what follows is a launch of its own."""

from __future__ import annotations

from collections.abc import Callable

import torch

from app.kernels.fused import AddRMSNorm, GatedActivation
from app.kernels.gemm import Activations, GatedRows, LinearOps, Product, WeightT


def composed(
    linear: Product[WeightT],
    act_and_mul: Callable[[torch.Tensor, GatedActivation], torch.Tensor],
    add_rms_norm: AddRMSNorm,
) -> LinearOps[WeightT]:
    """`linear` with these behind it; a norm is never deferred."""

    def gated_linear(
        x: Activations, weight: WeightT, bias: torch.Tensor | None, activation: GatedActivation
    ) -> torch.Tensor:
        """Gate and up side by side in weight [2 N, K]: activation(x gate^T) * (x up^T), [T, N]."""
        return act_and_mul(linear(x, weight, bias), activation)

    def linear_add_norm(
        x: GatedRows,
        weight: WeightT,
        bias: torch.Tensor | None,
        residual: torch.Tensor,
        norm_weight: torch.Tensor,
        eps: float,
        may_defer: bool,
    ) -> tuple[Activations, torch.Tensor]:
        """(the norm of x W^T + bias + residual, that sum), both [T, N]."""
        return add_rms_norm(linear(x, weight, bias), residual, norm_weight, eps)

    return LinearOps(linear=linear, gated_linear=gated_linear, linear_add_norm=linear_add_norm)
