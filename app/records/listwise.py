"""Scores of documents that a model reads together, in one prompt with the query (Jina Reranker v3). No torch (I8).

A mark behind each document and one behind the query have vectors, whose cosine is the score.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from app.checkpoints.added_tokens import added_token_id
from app.checkpoints.model_info import ModelInfo
from app.errors import CheckpointError
from app.records.step import Float32Array

RANKING = "JinaForRanking"
DOCUMENT_MARK, QUERY_MARK = "<|embed_token|>", "<|rerank_token|>"


@dataclass(slots=True, frozen=True)
class Listwise:
    """The marks' ids, and how much the model was trained to read at once."""

    document: int
    query: int
    query_tokens: int = 512
    document_tokens: int = 2048
    num_documents: int = 125  # of one prompt

    @classmethod
    def of(cls, info: ModelInfo) -> Listwise | None:
        """That of a model directory; None: the model reads a text or a pair. CheckpointError where a mark is no token
        of the vocabulary."""
        if info.architecture != RANKING:
            return None
        document, query = (added_token_id(info.directory, mark) for mark in (DOCUMENT_MARK, QUERY_MARK))
        if max(document, query) >= info.vocab_size:
            what = f"{DOCUMENT_MARK} {document} and {QUERY_MARK} {query} are not below vocab_size={info.vocab_size}"
            raise CheckpointError(f"{info.directory}: {what}", param="model")
        return cls(document, query)

    @property
    def marks(self) -> tuple[int, int]:
        """The tokens that have vectors."""
        return self.document, self.query


def listwise_scores(prompts: Sequence[Float32Array]) -> list[float]:
    """Scores of all documents of a query from the vectors [D + 1, E] of each of its prompts, the query's last. Where
    there are several, the query's vector is their mean, weighed by the best score of each."""
    documents, queries = [rows[:-1] for rows in prompts], [rows[-1] for rows in prompts]
    if len(prompts) == 1:
        return [float(score) for score in _cosines(queries[0], documents[0])]
    weights = [(1 + _cosines(query, own).max()) / 2 for query, own in zip(queries, documents, strict=True)]
    weights = weights if any(weights) else [1.0] * len(weights)
    query = np.average(queries, axis=0, weights=weights).astype(np.float32)
    return [float(score) for score in _cosines(query, np.concatenate(documents))]


def _cosines(query: Float32Array, documents: Float32Array) -> Float32Array:
    lengths = np.linalg.norm(query) * np.linalg.norm(documents, axis=1)
    found: Float32Array = documents @ query / np.maximum(lengths, 1e-12)
    return found
