"""A JSON response, written by msgspec: many times faster than the standard library where there are many numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.responses import Response


def json_response(body: dict[str, Any], headers: Mapping[str, str] | None = None) -> Response:
    """`body` as application/json."""
    return Response(msgspec.json.encode(body), headers=headers, media_type="application/json")
