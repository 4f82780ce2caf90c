"""Small layers that every rank holds in full: tables of positions, heads of classifiers."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from app.engine.layers.context import BuildContext
from app.engine.layers.weight import REPLICATED, Weight


class ReplicatedTable(nn.Module):
    """A table of [N, C], looked up by index."""

    def __init__(self, ctx: BuildContext, size: int, hidden_size: int) -> None:
        super().__init__()
        self.weight = Weight(torch.empty(size, hidden_size, dtype=ctx.dtype), REPLICATED)

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        """int [T] -> [T, C]."""
        return F.embedding(indices, self.weight)


class ReplicatedLinear(nn.Module):
    """y = x W^T + b."""

    def __init__(self, ctx: BuildContext, input_size: int, output_size: int, bias: bool = True) -> None:
        super().__init__()
        self.weight = Weight(torch.empty(output_size, input_size, dtype=ctx.dtype), REPLICATED)
        self.bias = Weight(torch.empty(output_size, dtype=ctx.dtype), REPLICATED) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[N, input_size] -> [N, output_size], in the weights' type."""
        return F.linear(x.to(self.weight.dtype), self.weight, self.bias)
