"""Products with adapted weights where the two are launches of their own: the base product by its own kernels, as it is
without an adapter, and the low-rank ones added to it, or to what it is added to."""

from __future__ import annotations

import torch

from app.kernels.fused import FUSED_OPS, GatedActivation
from app.kernels.gemm import Activations, GatedRows, Inputs, LinearOps
from app.kernels.lora import AdaptedWeight, AddProducts, Change


def ops_apart(add: AddProducts, change: Change | None = None) -> LinearOps[AdaptedWeight]:
    """The products, by a device's way to add. `change`: of weights whose matrices have `changes`, which come before
    what follows a product."""

    def linear(x: Inputs, weight: AdaptedWeight, bias: torch.Tensor | None) -> torch.Tensor:
        y = add(x, weight.matrices, weight.rows, weight.ops.linear(x, weight.weight, bias), in_place=True)
        if change is None:
            return y
        assert weight.matrices.changes is not None
        return change(y, weight.matrices.changes, weight.rows)

    def gated_linear(
        x: Activations, weight: AdaptedWeight, bias: torch.Tensor | None, activation: GatedActivation
    ) -> GatedRows:
        y = linear(x, weight, bias)
        return FUSED_OPS.on(y.device).act_and_mul(y, activation)

    def linear_add_norm(
        x: GatedRows,
        weight: AdaptedWeight,
        bias: torch.Tensor | None,
        residual: torch.Tensor,
        norm_weight: torch.Tensor,
        eps: float,
        may_defer: bool,
    ) -> tuple[Activations, torch.Tensor]:
        if change is not None:
            return FUSED_OPS.on(residual.device).add_rms_norm(linear(x, weight, bias), residual, norm_weight, eps)
        residual = add(x, weight.matrices, weight.rows, residual, in_place=False)
        return weight.ops.linear_add_norm(x, weight.weight, bias, residual, norm_weight, eps, may_defer)

    return LinearOps(linear=linear, gated_linear=gated_linear, linear_add_norm=linear_add_norm)
