"""Scores by all that BGE-M3 gives of a text (Chen et al., 2024): its vector, and weights and vectors of its tokens. No
torch (I8)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from app.records.late_interaction import LateInteraction
from app.records.step import Float32Array

ScoreKind = Literal["dense", "sparse", "vectors"]
_MAX_SIM = LateInteraction(is_mean=True)


@dataclass(slots=True, frozen=True)
class TextParts:
    """Holds what the model gave of one text."""

    dense: Float32Array  # [E]
    sparse: Mapping[int, float]  # weights of its tokens, by id
    vectors: Float32Array  # [T - 1, E]


_SCORES: Mapping[ScoreKind, Callable[[TextParts, TextParts], float]] = {
    "dense": lambda one, two: float(one.dense @ two.dense),
    "sparse": lambda one, two: sum(weight * two.sparse.get(token, 0.0) for token, weight in one.sparse.items()),
    "vectors": lambda one, two: _MAX_SIM.score(one.vectors, two.vectors),
}


def mixed_score(weights: Mapping[ScoreKind, float], query: TextParts, document: TextParts) -> float:
    """The mean of the kinds of scores, by their weights, of which one at least is above 0."""
    total = sum(weight * _SCORES[kind](query, document) for kind, weight in weights.items() if weight)
    return total / sum(weights.values())
