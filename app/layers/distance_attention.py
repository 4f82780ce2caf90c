"""Attention of a decoder whose scores have a relative position bias (Raffel et al., 2020): a number for each head and
each range of distances, learned."""

from __future__ import annotations

import torch
from torch import nn

from app.kernels.attention import HeadBias
from app.layers.attention import Attention, AttentionSettings
from app.layers.context import BuildContext
from app.layers.relative_bias import check_ranges, range_of
from app.layers.rotary import RotaryEmbedding
from app.layers.weight import CheckpointTensor, Weight, WeightSpec, expect_shape


class DistanceBias(nn.Module):
    """A table by distance, made when the checkpoint's table by range is loaded: steps look nothing up twice."""

    def __init__(self, ctx: BuildContext, num_buckets: int, num_heads: int, max_distance: int) -> None:
        super().__init__()
        check_ranges(num_buckets, max_distance)
        tp = ctx.groups.tp
        own = tp.share_of(num_heads, "num_attention_heads")
        self.num_buckets, self.whole_heads, self.first_head = num_buckets, num_heads, tp.rank * own
        self.max_distance, most = max_distance, min(max_distance, ctx.max_model_len)
        self.weight = Weight(torch.empty(own, most + 1, dtype=torch.float32), WeightSpec(self.load_weight))

    def load_weight(self, weight: Weight, tensor: CheckpointTensor, shard_id: str) -> None:
        """Spread this rank's heads of the checkpoint's table [num_buckets, H] over distances."""
        expect_shape(tensor, self.num_buckets, self.whole_heads)
        own = tensor.narrow(1, self.first_head, len(weight)).float().cpu()
        ranges = range_of(torch.arange(weight.shape[1], device="cpu"), self.num_buckets, self.max_distance)
        weight.data.copy_(own[ranges].T)


class DistanceAttention(Attention):
    """Attention over the cache with such a bias."""

    def __init__(
        self,
        ctx: BuildContext,
        settings: AttentionSettings,
        layer_index: int,
        rotary: RotaryEmbedding,
        bias: DistanceBias,
    ) -> None:
        super().__init__(ctx, settings, layer_index, rotary)
        self.ops.require(distance_bias=True)
        self.relative_bias = bias

    def _bias(self) -> dict[str, HeadBias]:
        return {"bias": HeadBias(self.sinks, self.slopes, self.relative_bias.weight)}
