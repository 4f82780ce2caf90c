"""One line of a batch of requests: custom_id, method, url, body, as in OpenAI's batch files.

A line is bounded as a body is, and what its body holds is not parsed here: those bytes go on as they came.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from app.api.http.body import MAX_DEPTH, check_shape
from app.errors import InvalidRequestError

URLS = frozenset(
    {
        "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/embeddings",
        "/v1/score", "/score", "/v1/rerank", "/rerank", "/v2/rerank", "/classify", "/pooling",
    }
)  # fmt: skip
MAX_CUSTOM_ID_CHARS = 512
MAX_ECHOED_CHARS = 256
_FIELDS = ("custom_id", "method", "url", "body")
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_NOT = frozenset({b"null", b"false", b"0"})  # JSON that asks for nothing

Members = Mapping[str, msgspec.Raw]  # an object's values, as they stand there


@dataclass(slots=True, frozen=True)
class BatchRequest:
    """One line of the input."""

    number: int  # from 1
    custom_id: str
    url: str
    body: bytes  # a JSON object, beginning with its brace
    num_bytes: int  # the line's size


@dataclass(slots=True, frozen=True)
class BadLine:
    """A line that is no request."""

    number: int
    custom_id: str | None
    message: str


def parse_line(number: int, raw: bytes, max_depth: int = MAX_DEPTH) -> BatchRequest | BadLine:
    """One line of a batch, numbered from 1; it must not be empty. `max_depth` bounds its body."""
    raw = raw.removeprefix(_BYTE_ORDER_MARK)
    try:
        check_shape(raw, max_depth + 1, "line")
        entry = members(raw)
    except InvalidRequestError as error:
        return BadLine(number, None, error.message)
    except msgspec.ValidationError:
        return BadLine(number, None, "not a JSON object")
    except (ValueError, RecursionError) as error:
        return BadLine(number, None, f"no JSON: {error}")
    return batch_request(number, entry, len(raw))


def members(raw: bytes | msgspec.Raw) -> dict[str, msgspec.Raw]:
    """The members of a JSON object. msgspec.ValidationError where it is none, ValueError where it is no JSON."""
    return msgspec.json.decode(raw, type=dict[str, msgspec.Raw])


def batch_request(number: int, entry: Members, num_bytes: int) -> BatchRequest | BadLine:
    """The request of a line that was the object `entry`, `num_bytes` long."""
    custom_id = _text(entry.get("custom_id"))
    if not custom_id or len(custom_id) > MAX_CUSTOM_ID_CHARS:
        return BadLine(number, None, f"custom_id: expected a text of 1 to {MAX_CUSTOM_ID_CHARS} characters")
    fault = _fault(entry)
    if fault is not None:
        return BadLine(number, custom_id, fault)
    return BatchRequest(number, custom_id, str(_text(entry["url"])), bytes(entry["body"]).strip(), num_bytes)


def _fault(entry: Members) -> str | None:
    """Says what is wrong with a request; None where nothing is."""
    unknown = min(entry.keys() - set(_FIELDS), default=None)
    if unknown is not None:
        return f"{unknown[:MAX_ECHOED_CHARS]}: unknown field; a line has {', '.join(_FIELDS)}"
    if _text(entry.get("method")) != "POST":
        return "method: only POST"
    if _text(entry.get("url")) not in URLS:
        return f"url: expected one of {', '.join(sorted(URLS))}"
    try:
        body = members(entry["body"])
    except (KeyError, ValueError):
        return "body: expected a JSON object"
    if _asks(body.get("background")):
        return "body.background: a batch is in the background as it is"
    return "body.stream: a batch has no streams" if _asks(body.get("stream")) else None


def _text(raw: msgspec.Raw | None) -> str | None:
    """A text that was written as `raw`; None where that is something else."""
    try:
        return None if raw is None else msgspec.json.decode(raw, type=str)
    except ValueError:
        return None


def _asks(raw: msgspec.Raw | None) -> bool:
    return raw is not None and bytes(raw).strip() not in _NOT
