"""ALiBi both ways (Press et al., 2022): a score falls by a head's slope with each place that lies between."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from app.layers.context import BuildContext
from app.layers.distance_bias import DistanceBias


class AlibiBias(DistanceBias):
    """Knows the slopes of this rank's heads."""

    def __init__(self, ctx: BuildContext, slopes: Sequence[float]) -> None:
        """`slopes`: of all heads."""
        super().__init__()
        tp, self.dtype = ctx.groups.tp, ctx.dtype
        count = tp.share_of(len(slopes), "num_attention_heads")
        own = slopes[tp.rank * count : (tp.rank + 1) * count]
        self.slopes: torch.Tensor
        self.register_buffer("slopes", torch.tensor(own, device=ctx.device), persistent=False)

    def values(self, distances: torch.Tensor) -> torch.Tensor:
        """See DistanceBias."""
        return torch.outer(self.slopes, -distances.abs().float()).to(self.dtype)
