"""The order of norms and sums; transformers judges whole models (families/test_encoder_families)."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from app.models.pre_norm_encoder import PreNormEncoderLayer


class Scaled(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: torch.Tensor, *_: Any) -> torch.Tensor:
        return x * self.factor


def test_blocks_read_normed_inputs() -> None:
    parts: list[Any] = [Scaled(factor) for factor in (2.0, 3.0, 5.0, 7.0)]
    x = torch.ones(2, 4)
    ctx: Any = None
    assert torch.equal(PreNormEncoderLayer(*parts)(x, ctx), (x + 6) + 35 * (x + 6))
    assert torch.equal(PreNormEncoderLayer(None, *parts[1:])(x, ctx), (x + 3) + 35 * (x + 3))
