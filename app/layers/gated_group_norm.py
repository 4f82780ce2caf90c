"""Gated RMS norms of state spaces: of all channels, or of groups of them, after the gate or before it."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from app.checkpoints.tensors.leaf import Share
from app.distributed.parallel_groups import RankGroup
from app.errors import ConfigError
from app.layers.context import BuildContext
from app.layers.layer import Layer
from app.layers.weight import CheckpointTensor, Weight, WeightSpec, expect_shape


class GatedGroupNorm(Layer):
    """norm(x * silu(gate)) * weight, or norm(x) * weight * silu(gate), in fp32; with `sigmoid` instead of silu.

    Ranks split the channels; where all of them are one group, squares are summed up over the ranks.
    """

    def __init__(
        self,
        ctx: BuildContext,
        channels: Share,
        num_groups: int,
        eps: float,
        *,
        norms_first: bool = False,
        sigmoid: bool = False,
    ) -> None:
        super().__init__()
        self.tp: RankGroup = ctx.groups.tp
        if num_groups > 1 and num_groups % self.tp.size:
            raise ConfigError(
                f"tensor_parallel_size={self.tp.size} does not divide the {num_groups} groups of channels that are "
                "normed together (n_groups)",
                param="tensor_parallel_size",
            )
        self.channels, self.eps, self.norms_first = channels, eps, norms_first
        self.activate = torch.sigmoid if sigmoid else F.silu
        self.is_shared = num_groups == 1 and self.tp.size > 1
        self.groups = max(1, num_groups // self.tp.size)
        self.weight = Weight(torch.ones(channels.size, dtype=ctx.dtype), WeightSpec(self.load))

    def load(self, weight: Weight, tensor: CheckpointTensor, shard_id: str) -> None:
        """Load this rank's channels."""
        expect_shape(tensor, self.channels.whole)
        tensor.read_into(weight.data, 0, self.channels.start)

    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """x and gate [T, C] -> [T, C] in the gate's type."""
        y, factor = x.float(), self.activate(gate.float())
        if not self.norms_first:
            y = y * factor
        y = (self._normed(y) * self.weight.float()).to(gate.dtype)
        return (y * factor).to(gate.dtype) if self.norms_first else y

    def _normed(self, y: torch.Tensor) -> torch.Tensor:
        groups = y.view(len(y), self.groups, -1)
        squares = groups.square().sum(-1, keepdim=True)
        if self.is_shared:
            squares = self.tp.all_reduce(squares)
        size = self.channels.whole if self.is_shared else groups.shape[2]
        return (groups * torch.rsqrt(squares / size + self.eps)).view_as(y)
