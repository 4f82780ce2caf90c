"""Layer normalisation (Ba, Kiros and Hinton, 2016)."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from app.kernels.gemm import Inputs, LinearOps, Normed, WeightT, materialize
from app.layers.context import BuildContext
from app.layers.norm import Norm
from app.layers.weight import REPLICATED, Weight


class LayerNorm(Norm):
    """(x - mean) / std * weight + bias over the last dimension; some families have no bias.

    `may_defer`: its only readers are linear layers, which can norm what they read (`DeferredLayerNorm`).
    """

    def __init__(self, ctx: BuildContext, size: int, eps: float, *, bias: bool = True, may_defer: bool = False) -> None:
        super().__init__()
        self.weight = Weight(torch.ones(size, dtype=ctx.dtype), REPLICATED)
        self.bias = Weight(torch.zeros(size, dtype=ctx.dtype), REPLICATED) if bias else None
        self.size = (size,)
        self.eps, self.may_defer = eps, may_defer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., C] -> [..., C]."""
        return F.layer_norm(x, self.size, self.weight, self.bias, self.eps)

    def after_product(
        self,
        ops: LinearOps[WeightT],
        x: Inputs,
        weight: WeightT,
        bias: torch.Tensor | None,
        residual: torch.Tensor,
    ) -> tuple[Normed, torch.Tensor]:
        """The norm of the product + residual, and the sum; one kernel on a GPU where rows are few."""
        own = ops.layer_norm
        if own is None:
            return super().after_product(ops, x, weight, bias, residual)
        rows = materialize(x)
        return own.linear_add_norm(rows, weight, bias, residual, self.weight, self.bias, self.eps, self.may_defer)
