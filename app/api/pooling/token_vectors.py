"""Answers of models that give a text's vector, and vectors and weights of its tokens (BGE-M3)."""

from __future__ import annotations

from typing import Any

from app.api.pooling.answer import numbers
from app.api.pooling.protocol import EncodingFormat
from app.records.mixed_scores import TextParts
from app.records.outputs import PooledResult
from app.text.pooling_prompt import PoolingPrompt
from app.text.served_model import ServedModel
from app.text.token_weights import token_weights


def weights_of(model: ServedModel, prompt: PoolingPrompt, result: PooledResult) -> dict[str, Any]:
    """The weights of a text's tokens [T, 1] as a sparse vector over the vocabulary."""
    found = token_weights(model.tokenizer, prompt.token_ids, result.array()[:, 0])
    return {"indices": list(found), "values": list(found.values())}


def parts_of(model: ServedModel, prompt: PoolingPrompt, result: PooledResult) -> TextParts:
    """A text's vector, weights and vectors of its tokens, of [T, E + 1], as scores compare them."""
    rows = result.array()
    return TextParts(rows[0, :-1], token_weights(model.tokenizer, prompt.token_ids, rows[:, -1]), rows[1:, :-1])


def all_of(model: ServedModel, prompt: PoolingPrompt, result: PooledResult, form: EncodingFormat) -> dict[str, Any]:
    """A text's `dense` vector, `sparse` weights and `vectors` of its tokens behind the first, of [T, E + 1]."""
    rows = result.array()
    parts = PooledResult.of(rows[0, :-1]), PooledResult.of(rows[1:, :-1]), PooledResult.of(rows[:, -1:])
    sparse = weights_of(model, prompt, parts[2])
    return {"dense": numbers(parts[0], form), "sparse": sparse, "vectors": numbers(parts[1], form)}
