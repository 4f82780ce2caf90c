"""Asks of a model that transcribes where in the sound its tokens were heard."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass(slots=True, frozen=True)
class AlignmentAsk:
    """The prompt's tokens from `first` on are to be aligned with the first `num_positions` of the encoder's output.

    The request's first output brings how much each of them attends to each position, fp32 [tokens, num_positions], as
    its `pooled`.
    """

    needs_all_tokens: ClassVar[bool] = True  # what a cached block holds has no queries

    first: int
    num_positions: int
