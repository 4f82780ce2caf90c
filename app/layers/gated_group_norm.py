"""Gated RMS norms of state spaces: of all channels, or of groups of them, after the gate or before it."""

from __future__ import annotations

import torch

from app.checkpoints.tensors.leaf import Share
from app.distributed.parallel_groups import RankGroup
from app.errors import ConfigError
from app.kernels.recurrent import RECURRENT_OPS, GatedNorm
from app.kernels.recurrent.reference import gate_factor
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
        self.sigmoid = sigmoid
        self.is_shared = num_groups == 1 and self.tp.size > 1
        self.groups = max(1, num_groups // self.tp.size)
        self.ops = ctx.kernels(RECURRENT_OPS)
        self.weight = Weight(torch.ones(channels.size, dtype=ctx.dtype), WeightSpec(self.load))

    def load(self, weight: Weight, tensor: CheckpointTensor, shard_id: str) -> None:
        """Load this rank's channels."""
        expect_shape(tensor, self.channels.whole)
        tensor.read_into(weight.data, 0, self.channels.start)

    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """x and gate [T, C] -> [T, C] in the gate's type."""
        if self.is_shared:
            return self._normed_together(x, gate)
        norm = GatedNorm(gate, self.weight, self.eps, self.norms_first, self.sigmoid)
        out: torch.Tensor = self.ops.gated_norm(x.view(len(x), self.groups, -1), norm)
        return out

    def _normed_together(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """One group of all ranks' channels."""
        y, factor = x.float(), gate_factor(gate, sigmoid=self.sigmoid)
        if not self.norms_first:
            y = y * factor
        squares = self.tp.all_reduce(y.square().sum(-1, keepdim=True))
        y = y * torch.rsqrt(squares / self.channels.whole + self.eps) * self.weight.float()
        return (y * factor if self.norms_first else y).to(gate.dtype)
