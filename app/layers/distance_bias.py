"""Adds to an encoder's scores by how far a key is from the query, the same in all layers."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import nn

from app.kernels.attention.encoder import ScoreBias
from app.layers.context import ForwardContext


class DistanceBias(nn.Module, ABC):
    """A number for each head and each distance."""

    @abstractmethod
    def values(self, distances: torch.Tensor) -> torch.Tensor:
        """Distances int64 [N] from a query to its keys, below 0 for those before it -> [H, N] of this rank's heads."""

    def of_step(self, ctx: ForwardContext) -> ScoreBias:
        """Returns what a step's layers add; computed once for each length."""

        def bias(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
            length = query.shape[2]
            found: torch.Tensor | None = ctx.memo.get((self, length))
            if found is None:
                ctx.memo[self, length] = found = self.of_length(length, query.device)
            return found

        return bias

    def of_length(self, length: int, device: torch.device) -> torch.Tensor:
        """[1, H, L, L]: the row of a query holds what the keys before and after it get."""
        values = self.values(torch.arange(1 - length, length, device=device)).contiguous()
        return values.unfold(1, length, 1).flip(1).unsqueeze(0)
