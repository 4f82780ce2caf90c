"""Layer normalisation (Ba, Kiros and Hinton, 2016)."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from app.kernels.fused import FUSED_OPS
from app.kernels.gemm import Activations, Inputs, LinearOps, WeightT
from app.layers.context import BuildContext
from app.layers.norm import Norm
from app.layers.weight import REPLICATED, Weight


class LayerNorm(Norm):
    """(x - mean) / std * weight + bias over the last dimension; some families have no bias."""

    def __init__(self, ctx: BuildContext, size: int, eps: float, *, bias: bool = True) -> None:
        super().__init__()
        self.weight = Weight(torch.ones(size, dtype=ctx.dtype), REPLICATED)
        self.bias = Weight(torch.zeros(size, dtype=ctx.dtype), REPLICATED) if bias else None
        self.size = (size,)
        self.eps = eps
        fused = ctx.kernels(FUSED_OPS)
        self._add_norm, self._norm = fused.add_layer_norm, fused.layer_norm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., C] -> [..., C]."""
        return F.layer_norm(x, self.size, self.weight, self.bias, self.eps)

    def of_sum(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """The norm of x + residual [T, C]; one kernel on a GPU."""
        return self._add_norm(x, residual, self.weight, self.bias, self.eps, keeps_sum=False)[0]

    def after_add(
        self, x: torch.Tensor, residual: torch.Tensor, first: Norm | None = None
    ) -> tuple[Activations, torch.Tensor]:
        """The norm of x + residual, and the sum; one kernel on a GPU."""
        if first is not None:
            return super().after_add(x, residual, first)
        normed, total = self._add_norm(x, residual, self.weight, self.bias, self.eps, keeps_sum=True)
        assert total is not None, "a sum that was to be kept"
        return normed, total

    def after_product(
        self,
        ops: LinearOps[WeightT],
        x: Inputs,
        weight: WeightT,
        bias: torch.Tensor | None,
        residual: torch.Tensor,
    ) -> tuple[Activations, torch.Tensor]:
        """The norm of the product + residual, and the sum; where rows are few the sum is the product's launch."""
        total = None if ops.linear_add is None else ops.linear_add(x, weight, bias, residual)
        if total is None:
            return super().after_product(ops, x, weight, bias, residual)
        return self._norm(total, self.weight, self.bias, self.eps), total
