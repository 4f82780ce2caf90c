"""Holds what the chunks of gated delta nets are by themselves, until a scan takes a state through them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch

from app.kernels.recurrent import CHUNK, DeltaHeads, StateStep

TILES = 2  # of a chunk and head
FACTORS = 4  # rows of factors of a chunk and head


@dataclass(slots=True, frozen=True)
class DeltaTiles:
    """Tiles [CHUNK, CHUNK] and factors of each chunk and value head; rows behind a request's last token change nothing.

    A chunk's number: chunk c of the r-th of the requests behind the short ones, whose first token is the t-th of
    theirs, is number t // CHUNK + r + c. So it is known without the others, and no two have the same.
    """

    # How changes of the chunk's tokens follow from what each one's value is beside what the state says of its key; and
    # what each query gets of each change.
    tiles: torch.Tensor  # [chunks * Hv * TILES * CHUNK, CHUNK]
    # Each token's: what a query is multiplied with; a change, before it meets its key; what is left of the state
    # behind the chunk, for all tokens the same; what a key is multiplied with, negated.
    factors: torch.Tensor  # fp32 [chunks * Hv * FACTORS * CHUNK]

    @classmethod
    def of(cls, mixed: torch.Tensor, heads: DeltaHeads, step: StateStep) -> Self:
        """Room for a step's chunks."""
        num_tokens = len(mixed) - step.num_short * step.short_len
        rows = (num_tokens // CHUNK + step.num_long) * heads.num_values * CHUNK
        factors = mixed.new_empty(rows * FACTORS, dtype=torch.float32)
        return cls(mixed.new_empty(rows * TILES, CHUNK), factors)
