"""The parts that all answers of the pooling endpoints have: numbers as JSON or base64, ids, usage."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Any

from starlette.responses import Response

from app.api.http.json_response import json_response
from app.api.pooling.protocol import EncodingFormat
from app.api.pooling.vector_forms import in_form
from app.records.outputs import PooledResult
from app.records.step import Float32Array
from app.text.pooling_prompt import PoolingPrompt


def new_id(kind: str) -> str:
    """An id that the server makes, such as `embd-...`."""
    return f"{kind}-{uuid.uuid4().hex}"


def numbers(result: PooledResult, form: EncodingFormat) -> Any:
    """Nested lists, the fp32 bytes (little-endian) as base64, or what is not 0 of a vector or of each."""
    array = result.array()
    if form != "sparse":
        return in_form(array, form)
    return _sparse(array) if array.ndim == 1 else [_sparse(row) for row in array]


def _sparse(vector: Float32Array) -> dict[str, list[Any]]:
    """A vector's numbers other than 0, and where they stand."""
    indices = vector.nonzero()[0]
    return {"indices": indices.tolist(), "values": vector[indices].tolist()}


def usage(prompts: Sequence[PoolingPrompt]) -> dict[str, int]:
    """Tokens that were read; none is written."""
    count = sum(len(prompt.token_ids) for prompt in prompts)
    return {"prompt_tokens": count, "total_tokens": count}


def meta_of(units: dict[str, int]) -> dict[str, Any]:
    """The `meta` of Cohere's answers: version, and what was read."""
    return {"api_version": {"version": "2"}, "billed_units": units}


def listed(answer_id: str, model: str, data: list[dict[str, Any]], prompts: Sequence[PoolingPrompt]) -> Response:
    """The list that most of the endpoints answer with."""
    head = {"id": answer_id, "object": "list", "created": int(time.time()), "model": model}
    return json_response(head | {"data": data, "usage": usage(prompts)})
