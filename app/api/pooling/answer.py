"""What all answers of the pooling endpoints have: numbers as JSON or base64, ids, usage."""

from __future__ import annotations

import base64
import time
import uuid
from collections.abc import Sequence
from typing import Any

from starlette.responses import Response

from app.api.json_response import json_response
from app.api.pooling.protocol import EncodingFormat
from app.engine.outputs import PooledResult
from app.text.pooling_prompt import PoolingPrompt


def new_id(kind: str) -> str:
    """An id that the server makes, such as `embd-...`."""
    return f"{kind}-{uuid.uuid4().hex}"


def numbers(result: PooledResult, form: EncodingFormat) -> Any:
    """Nested lists, or the fp32 bytes (little-endian) as base64."""
    return base64.b64encode(result.data).decode() if form == "base64" else result.array().tolist()


def usage(prompts: Sequence[PoolingPrompt]) -> dict[str, int]:
    """Tokens that were read; none is written."""
    count = sum(len(prompt.token_ids) for prompt in prompts)
    return {"prompt_tokens": count, "total_tokens": count}


def listed(answer_id: str, model: str, data: list[dict[str, Any]], prompts: Sequence[PoolingPrompt]) -> Response:
    """The list that most of the endpoints answer with."""
    head = {"id": answer_id, "object": "list", "created": int(time.time()), "model": model}
    return json_response(head | {"data": data, "usage": usage(prompts)})
