"""Gemma's RMS norm, whose checkpoints hold the weight less one."""

from __future__ import annotations

import torch

from app.layers.context import BuildContext
from app.layers.norm import RMSNorm
from app.layers.weight import CheckpointTensor, Weight, WeightSpec, expect_shape


class OffsetRMSNorm(RMSNorm):
    """x / rms(x) * (1 + weight), rounded once. The sum is kept in fp32: in 16 bits it would lose the weight's bits."""

    def __init__(self, ctx: BuildContext, size: int, eps: float, *, may_defer: bool = False) -> None:
        super().__init__(ctx, size, eps, may_defer=may_defer)
        self.weight = Weight(torch.ones(size, dtype=torch.float32), WeightSpec(_load_plus_one))


def _load_plus_one(weight: Weight, tensor: CheckpointTensor, shard_id: str) -> None:
    expect_shape(tensor, *weight.shape)
    weight.data.copy_(tensor.narrow(0, 0, len(weight)).float() + 1.0)
