"""The order of norms and sums; transformers judges whole models (families/test_encoder_families)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from app.layers.norm import Norm
from app.models.pre_norm_encoder import PreNormEncoder, PreNormEncoderLayer


class Scaled(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: torch.Tensor, epilogue: Any, ctx: Any = None) -> Any:
        return epilogue.after(x * self.factor)


class ScaledNorm(Norm):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor


@pytest.mark.parametrize("first", [2.0, None])
def test_blocks_read_normed_inputs(first: float | None) -> None:
    embedding: Any = nn.Embedding.from_pretrained(torch.ones(3, 4))
    ctx: Any = None
    layers: list[Any] = [
        PreNormEncoderLayer(norm, Scaled(3.0), ScaledNorm(5.0), Scaled(7.0))  # type: ignore[arg-type]
        for norm in (None if first is None else ScaledNorm(first), ScaledNorm(2.0))
    ]
    found = PreNormEncoder(embedding, None, layers, ScaledNorm(11.0))(torch.tensor([0, 2]), ctx)
    x = 1.0
    for factor in (first or 1.0, 2.0):
        x += 3 * factor * x
        x += 7 * 5 * x
    assert torch.equal(found, torch.full((2, 4), 11 * x))
