"""Norms of queries and keys, by kind.

Those that work on single heads with one weight for all are made in the kernel that rotates (`HeadNorm`); the others
change a step's projections in place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from torch import nn

from app.distributed.parallel_groups import RankGroup
from app.kernels.fused import FUSED_OPS
from app.layers.context import BuildContext
from app.layers.layer import Layer
from app.layers.layer_norm import LayerNorm
from app.layers.norm import RMSNorm
from app.layers.offset_norm import OffsetRMSNorm
from app.layers.weight import CheckpointTensor, Weight, WeightSpec, expect_shape

QueryKeyNorm = Literal[
    "head_rms",
    "head_unit_rms",
    "turned_head_rms",
    "head_offset_rms",
    "projection_rms",
    "projection_layer_norm",
    "head_layer_norm",
    "head_biased_layer_norm",
    "layer_norms_of_heads",
]


class HeadShare:
    """This rank's heads of a projection; ranks may share heads."""

    def __init__(self, tp: RankGroup, whole: int, own: int) -> None:
        self.tp = tp
        self.whole = whole  # heads of the model
        self.own = own
        self.copies = max(1, own * tp.size // whole)  # ranks that hold the same head
        self.first = tp.rank // self.copies * own


class UnitRMSNorm(RMSNorm):
    """An RMS norm without weights (Llama 4, which applies it after the rotation: a head's norm is the same)."""

    def __init__(self, ctx: BuildContext, head_dim: int, eps: float) -> None:
        super().__init__(ctx, head_dim, eps)
        ones = torch.ones(head_dim, dtype=ctx.dtype, device=ctx.device)
        del self.weight
        self.register_buffer("weight", ones, persistent=False)


class TurnedRMSNorm(UnitRMSNorm):
    """An RMS norm of rotated heads (Hunyuan). A head's norm is the same before the rotation, and what multiplies the
    numbers of queries and of keys after it may as well multiply those of queries alone."""

    def __init__(self, ctx: BuildContext, head_dim: int, eps: float) -> None:
        super().__init__(ctx, head_dim, eps)
        self.turned = RMSNorm(ctx, head_dim, eps)


class ProjectionRMSNorm(Layer):
    """RMS norm over all heads of a projection together (OLMo 2), whose squares are summed up over the ranks."""

    def __init__(self, ctx: BuildContext, heads: HeadShare, head_dim: int, eps: float) -> None:
        super().__init__()
        self.heads, self.head_dim, self.eps = heads, head_dim, eps
        self.norm = ctx.kernels(FUSED_OPS).rms_norm
        spec = WeightSpec(self.load_weight)
        self.weight = Weight(torch.ones(heads.own * head_dim, dtype=ctx.dtype), spec)

    def load_weight(self, weight: Weight, tensor: CheckpointTensor, shard_id: str) -> None:
        """Load this rank's heads."""
        expect_shape(tensor, self.heads.whole * self.head_dim)
        weight.data.copy_(tensor.narrow(0, self.heads.first * self.head_dim, len(weight)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, H, D] -> the same, normed."""
        if self.heads.tp.size == 1:
            return self.norm(x.flatten(1), self.weight, self.eps).view(x.shape)
        squares = self.heads.tp.all_reduce(x.float().square().sum((1, 2))) / self.heads.copies
        factor = (squares / (self.heads.whole * self.head_dim) + self.eps).rsqrt().view(-1, 1, 1)
        return (x * factor * self.weight.float().view(1, -1, self.head_dim)).to(x.dtype)


class ProjectionLayerNorm(Layer):
    """Layer norm over all heads of a projection together (Jina Embeddings v2), whose sums are those of all ranks."""

    def __init__(self, ctx: BuildContext, heads: HeadShare, head_dim: int, eps: float) -> None:
        super().__init__()
        self.heads, self.head_dim, self.eps = heads, head_dim, eps
        spec, size = WeightSpec(self.load_weight), heads.own * head_dim
        self.weight = Weight(torch.ones(size, dtype=ctx.dtype), spec)
        self.bias = Weight(torch.zeros(size, dtype=ctx.dtype), spec)

    def load_weight(self, weight: Weight, tensor: CheckpointTensor, shard_id: str) -> None:
        """Load this rank's heads."""
        expect_shape(tensor, self.heads.whole * self.head_dim)
        weight.data.copy_(tensor.narrow(0, self.heads.first * self.head_dim, len(weight)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, H, D] -> the same, normed."""
        flat = x.flatten(1)
        if self.heads.tp.size == 1:
            return F.layer_norm(flat, flat.shape[1:], self.weight, self.bias, self.eps).view(x.shape)
        shares = self.heads.copies * self.heads.whole * self.head_dim
        apart = flat.float() - self.heads.tp.all_reduce(flat.float().sum(1, keepdim=True)) / shares
        spread = self.heads.tp.all_reduce(apart.square().sum(1, keepdim=True)) / shares
        normed = apart * (spread + self.eps).rsqrt() * self.weight.float() + self.bias.float()
        return normed.to(x.dtype).view(x.shape)


class HeadLayerNorm(Layer):
    """Layer norm of each head, with weights of its own (Cohere) or common ones (Phi); `bias` as they have."""

    def __init__(self, ctx: BuildContext, heads: HeadShare, head_dim: int, eps: float, *, bias: bool) -> None:
        super().__init__()
        self.heads, self.head_dim, self.eps = heads, head_dim, eps
        spec = WeightSpec(self.load_weight)
        self.weight = Weight(torch.ones(heads.own, head_dim, dtype=ctx.dtype), spec)
        self.bias = Weight(torch.zeros(heads.own, head_dim, dtype=ctx.dtype), spec) if bias else None

    def load_weight(self, weight: Weight, tensor: CheckpointTensor, shard_id: str) -> None:
        """Load this rank's heads, or what is common to all."""
        if tuple(tensor.shape) == (self.head_dim,):
            weight.data.copy_(tensor.narrow(0, 0, self.head_dim).expand_as(weight))
            return
        expect_shape(tensor, self.heads.whole, self.head_dim)
        weight.data.copy_(tensor.narrow(0, self.heads.first, self.heads.own))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, H, D] -> the same, normed."""
        normed = F.layer_norm(x.float(), (self.head_dim,), eps=self.eps) * self.weight.float()
        return (normed if self.bias is None else normed + self.bias.float()).to(x.dtype)


class LayerNormsOfHeads(Layer):
    """A layer norm for each head, stored one by one (StableLM); a rank holds all, and norms its own heads."""

    def __init__(self, ctx: BuildContext, heads: HeadShare, head_dim: int, eps: float) -> None:
        super().__init__()
        self.norms = nn.ModuleList([LayerNorm(ctx, head_dim, eps, bias=False) for _ in range(heads.whole)])
        self.own, self.size, self.eps = slice(heads.first, heads.first + heads.own), (head_dim,), eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, H, D] -> the same, normed."""
        weight = torch.stack([norm.get_parameter("weight") for norm in self.norms[self.own]])
        return (F.layer_norm(x.float(), self.size, eps=self.eps) * weight.float()).to(x.dtype)


Make = Callable[[BuildContext, HeadShare, int, float], nn.Module]

QUERY_KEY_NORMS: dict[QueryKeyNorm, Make] = {
    "head_rms": lambda ctx, heads, head_dim, eps: RMSNorm(ctx, head_dim, eps),
    "head_unit_rms": lambda ctx, heads, head_dim, eps: UnitRMSNorm(ctx, head_dim, eps),
    "turned_head_rms": lambda ctx, heads, head_dim, eps: TurnedRMSNorm(ctx, head_dim, eps),
    "head_offset_rms": lambda ctx, heads, head_dim, eps: OffsetRMSNorm(ctx, head_dim, eps),
    "projection_rms": ProjectionRMSNorm,
    "projection_layer_norm": ProjectionLayerNorm,
    "head_layer_norm": lambda ctx, heads, head_dim, eps: HeadLayerNorm(ctx, heads, head_dim, eps, bias=False),
    "head_biased_layer_norm": lambda ctx, heads, head_dim, eps: HeadLayerNorm(ctx, heads, head_dim, eps, bias=True),
    "layer_norms_of_heads": LayerNormsOfHeads,
}
