"""A JSON response, written by msgspec: many times faster than the standard library where there are many numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.responses import Response


def written(value: Any) -> msgspec.Raw:
    """`value` as JSON, for a place in a body.

    An answer with logprobs may have a hundred thousand small dicts. Kept until it is whole, the garbage collector would
    walk them again and again, and all threads wait for it.
    """
    return msgspec.Raw(msgspec.json.encode(value))


def json_response(body: dict[str, Any], headers: Mapping[str, str] | None = None) -> Response:
    """`body` as application/json."""
    return Response(msgspec.json.encode(body), headers=headers, media_type="application/json")
