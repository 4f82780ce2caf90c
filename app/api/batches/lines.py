"""One line of a batch of requests: custom_id, method, url, body, as in OpenAI's batch files."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

URLS = frozenset(
    {
        "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/embeddings",
        "/v1/score", "/score", "/v1/rerank", "/rerank", "/v2/rerank", "/classify", "/pooling",
    }
)  # fmt: skip
_FIELDS = ("custom_id", "method", "url", "body")


@dataclass(slots=True, frozen=True)
class BatchRequest:
    """One line of the input."""

    number: int  # from 1
    custom_id: str
    url: str
    body: dict[str, Any]
    num_bytes: int  # the line's size


@dataclass(slots=True, frozen=True)
class BadLine:
    """A line that is no request."""

    number: int
    custom_id: str | None
    message: str


def parse_line(number: int, raw: bytes) -> BatchRequest | BadLine:
    """One line of a batch, numbered from 1; it must not be empty."""
    try:
        entry = json.loads(raw)
    except (ValueError, RecursionError) as error:
        return BadLine(number, None, f"no JSON: {error}")
    return batch_request(number, entry, len(raw))


def batch_request(number: int, entry: Any, num_bytes: int) -> BatchRequest | BadLine:
    """The request of a line that was `entry` in JSON, `num_bytes` long."""
    if not isinstance(entry, dict):
        return BadLine(number, None, "not a JSON object")
    custom_id = entry.get("custom_id")
    if not isinstance(custom_id, str) or not custom_id:
        return BadLine(number, None, "custom_id: expected a text that is not empty")
    fault = _fault(entry)
    if fault is not None:
        return BadLine(number, custom_id, fault)
    return BatchRequest(number, custom_id, entry["url"], entry["body"], num_bytes)


def _fault(entry: dict[str, Any]) -> str | None:
    """What is wrong with a request, if anything."""
    unknown = sorted(set(entry) - set(_FIELDS))
    if unknown:
        return f"{unknown[0]}: unknown field; a line has {', '.join(_FIELDS)}"
    if entry.get("method") != "POST":
        return "method: only POST"
    if not isinstance(entry.get("url"), str) or entry["url"] not in URLS:
        return f"url: expected one of {', '.join(sorted(URLS))}"
    if not isinstance(entry.get("body"), dict):
        return "body: expected a JSON object"
    if entry["body"].get("background"):
        return "body.background: a batch is in the background as it is"
    return "body.stream: a batch has no streams" if entry["body"].get("stream") else None
