"""JSON responses that cannot fail: text that is no Unicode is escaped, and what is no number is null.

Long answers are written by msgspec: many times faster than the standard library where there are many numbers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.responses import Response


def utf8(text: str) -> bytes:
    """JSON, or events of JSON, as it is sent: an unpaired surrogate, which UTF-8 has no bytes for, is an escape."""
    return text.encode("utf-8", "backslashreplace")


def json_bytes(value: Any) -> bytes:
    """`value` as JSON; NaN and infinities, which JSON has no words for, are null."""
    options: dict[str, Any] = {"ensure_ascii": False, "separators": (",", ":"), "default": _plain}
    try:
        return utf8(json.dumps(value, allow_nan=False, **options))
    except ValueError:
        plain = json.loads(json.dumps(value, **options), parse_constant=lambda _: None)
        return utf8(json.dumps(plain, **options))


def written(value: Any) -> msgspec.Raw:
    """`value` as JSON, for a place in a body.

    An answer with logprobs may have a hundred thousand small dicts. Kept until it is whole, the garbage collector would
    walk them again and again, and all threads wait for it.
    """
    return msgspec.Raw(_quickly(value))


def json_response(body: dict[str, Any], headers: Mapping[str, str] | None = None) -> Response:
    """`body`, which may hold what `written` gave, as application/json."""
    return Response(_quickly(body), headers=headers, media_type="application/json")


class JSONResponse(Response):
    """A JSON value as application/json."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """The body; called once, by the constructor."""
        return json_bytes(content)


def _quickly(value: Any) -> bytes:
    try:
        return msgspec.json.encode(value)
    except UnicodeEncodeError:
        return json_bytes(value)


def _plain(value: Any) -> Any:
    if isinstance(value, msgspec.Raw):
        return json.loads(bytes(value))
    raise TypeError(f"{type(value).__name__} is no JSON")
