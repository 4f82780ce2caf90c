"""Positions as sines and cosines that are added to embeddings (Vaswani et al., "Attention Is All You Need", 2017)."""

from __future__ import annotations

import math

import torch


class SinusoidalPositions:
    """A computed table: sines in the first half of a row, cosines in the second. Not a module: nothing is loaded."""

    def __init__(
        self,
        num_positions: int,
        hidden_size: int,
        empty_row: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        reaches_last: bool = True,
    ) -> None:
        """`empty_row` holds zeros, -1: none does; `reaches_last`: the slowest wave is 10,000 times as slow as the
        first, else one step less (the paper's own)."""
        half = hidden_size // 2
        step = math.log(10_000.0) / (max(half - 1, 1) if reaches_last else half)
        frequencies = torch.exp(torch.arange(half, dtype=torch.float32, device="cpu") * -step)
        angles = torch.outer(torch.arange(num_positions, dtype=torch.float32, device="cpu"), frequencies)
        table = torch.cat((angles.sin(), angles.cos(), torch.zeros(num_positions, hidden_size % 2, device="cpu")), 1)
        if 0 <= empty_row < num_positions:
            table[empty_row] = 0.0
        self.table = table.to(device=device, dtype=dtype)

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """int64 [T] -> [T, C]."""
        return self.table[rows]
