"""Convolutions over a request's last few tokens, channel by channel, whose inputs are kept from step to step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from app.checkpoints.tensors.leaf import Share
from app.kernels.recurrent import RECURRENT_OPS, StateStep
from app.layers.cache_spec import StateTensor
from app.layers.context import BuildContext
from app.layers.layer import Layer
from app.layers.weight import CheckpointTensor, ShapeMismatch, Weight, WeightSpec, expect_shape


class ShortConv(Layer):
    """Each channel's sum over its last `width` tokens; `shares`: this rank's channels, part by part; `parts`: names in
    a checkpoint that has the parts apart."""

    def __init__(
        self,
        ctx: BuildContext,
        shares: Sequence[Share],
        width: int,
        *,
        bias: bool,
        activate: bool = True,
        parts: Sequence[str] = (),
    ) -> None:
        super().__init__()
        self.shares, self.activate, self.parts = tuple(shares), activate, tuple(parts)
        channels, spec = sum(share.size for share in shares), WeightSpec(self.load, self.parts)
        self.weight = Weight(torch.empty(channels, width, dtype=ctx.dtype), spec)
        self.bias = Weight(torch.empty(channels, dtype=ctx.dtype), replace(spec, dummy=0.0)) if bias else None
        self.state = StateTensor((width - 1, channels), ctx.dtype)
        self.ops = ctx.kernels(RECURRENT_OPS)

    def load(self, weight: Weight, tensor: CheckpointTensor, shard_id: str) -> None:
        """This rank's channels of a weight [C, 1, W] or a bias [C], whose parts lie one behind the other or apart."""
        part = self.parts.index(shard_id) if shard_id else None
        shares = self.shares if part is None else self.shares[part : part + 1]
        whole = sum(share.whole for share in shares)
        if tensor.shape[:1] != (whole,):
            raise ShapeMismatch(f"has shape {list(tensor.shape)}, the model expects {whole} channels")
        tensor = tensor.reshaped(whole, *weight.shape[1:])
        begin, offset = 0, sum(share.size for share in self.shares[:part]) if part else 0
        for share in shares:
            weight.data[offset : offset + share.size] = tensor.narrow(0, begin + share.start, share.size)
            begin, offset = begin + share.whole, offset + share.size

    def forward(self, x: torch.Tensor, states: torch.Tensor, step: StateStep) -> torch.Tensor:
        """x [T, C] -> [T, C]; the last tokens of each request stay in `states`."""
        out: torch.Tensor = self.ops.causal_conv(x, self.weight, self.bias, states, step, activate=self.activate)
        return out


class HeadNumbers:
    """Loads one number for each head: this rank's, in fp32."""

    def __init__(self, share: Share) -> None:
        self.share = share

    def weight(self, dummy: float) -> Weight:
        """The parameter, [H]."""
        return Weight(torch.empty(self.share.size, dtype=torch.float32), WeightSpec(self.load, dummy=dummy))

    def load(self, weight: Weight, tensor: CheckpointTensor, shard_id: str) -> None:
        """Load this rank's heads."""
        expect_shape(tensor, self.share.whole)
        weight.data.copy_(tensor.narrow(0, self.share.start, self.share.size))
