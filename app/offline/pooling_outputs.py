"""Holds what `LLM.embed`, `score`, `classify` and `encode` hand to their caller."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from app.records.step import Float32Array

OutputT = TypeVar("OutputT")


@dataclass(slots=True)
class PoolingOutput:
    """The model's own result: [E], [T, E] or [classes]."""

    data: Float32Array


@dataclass(slots=True)
class EmbeddingOutput:
    """A text as a vector."""

    embedding: list[float]


@dataclass(slots=True)
class ClassificationOutput:
    """Probabilities of the classes, in the order of the model's labels."""

    probs: list[float]


@dataclass(slots=True)
class ScoringOutput:
    """The score of a pair of texts."""

    score: float


@dataclass(slots=True)
class PoolingRequestOutput(Generic[OutputT]):
    """One prompt's result. A score of two embeddings lists the tokens of both."""

    request_id: str
    prompt_token_ids: list[int]
    outputs: OutputT
    finished: bool = True
