"""Relative position bias (Raffel et al., 2020): a number for each head and each range of distances, learned, added to
the scores. All layers of a model share it."""

from __future__ import annotations

import math

import torch

from app.distributed.parallel_groups import RankGroup
from app.errors import CheckpointError
from app.layers.context import BuildContext
from app.layers.distance_bias import DistanceBias
from app.layers.weight import CheckpointTensor, Weight, WeightSpec, expect_shape


class RelativeBias(DistanceBias):
    """Half of the ranges are for what follows; near distances have one each, farther ones share theirs."""

    def __init__(
        self, ctx: BuildContext, num_buckets: int, num_heads: int, max_distance: int, tp: RankGroup | None = None
    ) -> None:
        """`tp`: the ranks that share the heads; None: those of the model."""
        super().__init__()
        tp = tp or ctx.groups.tp
        check_ranges(num_buckets // 2, max_distance)
        self.num_buckets, self.whole_heads, self.max_distance = num_buckets, num_heads, max_distance
        self.num_heads = tp.share_of(num_heads, "num_attention_heads")
        self.first_head = tp.rank * self.num_heads
        self.weight = Weight(torch.empty(num_buckets, self.num_heads, dtype=ctx.dtype), WeightSpec(self.load_weight))

    def load_weight(self, weight: Weight, tensor: CheckpointTensor, shard_id: str) -> None:
        """Load this rank's heads."""
        expect_shape(tensor, self.num_buckets, self.whole_heads)
        weight.data.copy_(tensor.narrow(1, self.first_head, self.num_heads))

    def values(self, distances: torch.Tensor) -> torch.Tensor:
        """See DistanceBias."""
        return self.weight[self.bucket_of(distances)].T

    def bucket_of(self, distances: torch.Tensor) -> torch.Tensor:
        """The row of the table for distances int64 from a query to its keys, below 0 for those before it."""
        half = self.num_buckets // 2
        return range_of(distances.abs(), half, self.max_distance) + half * (distances > 0)


def check_ranges(num_ranges: int, max_distance: int) -> None:
    """CheckpointError where the far ranges of one side begin behind their end."""
    if max_distance <= num_ranges // 2:
        what = f"relative_attention_max_distance={max_distance} is not beyond the near ones of {num_ranges} buckets"
        raise CheckpointError(f"config.json is not usable: {what}", param="model")


def range_of(far: torch.Tensor, num_ranges: int, max_distance: int) -> torch.Tensor:
    """The range of each distance int64 to one side, of so many: half are for one distance each, the others grow by a
    factor up to `max_distance`, from which on all share the last."""
    exact = num_ranges // 2
    share = torch.log(far.clamp(min=1).float() / exact) / math.log(max_distance / exact)
    grown = (exact + (share * (num_ranges - exact)).long()).clamp(max=num_ranges - 1)
    return torch.where(far < exact, far, grown)
