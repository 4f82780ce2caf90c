"""Layer normalisation (Ba, Kiros and Hinton, 2016)."""

from __future__ import annotations

import torch
import torch.nn.functional as F

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

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., C] -> [..., C]."""
        return F.layer_norm(x, self.size, self.weight, self.bias, self.eps)
