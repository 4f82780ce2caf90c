"""Query parameters: each is read by one of these, so none can be longer or larger than its route expects."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from starlette.requests import Request

from app.errors import InvalidRequestError

MAX_CHARS = 256
_INTEGER = re.compile(r"[0-9]{1,18}")


def text_param(request: Request, name: str) -> str | None:
    """A text of at most MAX_CHARS; None when it is not given."""
    value = request.query_params.get(name)
    if value is not None and len(value) > MAX_CHARS:
        raise InvalidRequestError(f"at most {MAX_CHARS} characters", param=name)
    return value


def int_param(request: Request, name: str, default: int, lowest: int, highest: int) -> int:
    """A whole number in `lowest..highest`, which are not negative."""
    value = request.query_params.get(name)
    if value is None:
        return default
    if not _INTEGER.fullmatch(value) or not lowest <= int(value) <= highest:
        raise InvalidRequestError(f"must be from {lowest} to {highest}", param=name)
    return int(value)


def bool_param(request: Request, name: str) -> bool:
    """true or false; false when it is not given."""
    return choice_param(request, name, ("false", "true")) == "true"


def choice_param(request: Request, name: str, known: Sequence[str]) -> str:
    """One of `known`; the first when it is not given."""
    value = request.query_params.get(name, known[0])
    if value not in known:
        raise InvalidRequestError(f"must be {' or '.join(known)}", param=name)
    return value


def choices_param(request: Request, name: str, known: Sequence[str]) -> list[str] | None:
    """Some of `known`, each given by a parameter of its own; None when there is none."""
    values = request.query_params.getlist(name)
    if any(value not in known for value in values):
        raise InvalidRequestError(f"must be {' or '.join(known)}", param=name)
    return list(dict.fromkeys(values)) or None


def no_other_params(request: Request, *known: str) -> None:
    """InvalidRequestError for the first parameter that is none of these."""
    if unknown := [name for name in request.query_params if name not in known]:
        takes = f"; known: {', '.join(known)}" if known else ""
        raise InvalidRequestError(f"unknown query parameter {unknown[0][:MAX_CHARS]!r}{takes}", param=unknown[0][:64])


def list_page(items: Sequence[dict[str, Any]], has_more: bool) -> dict[str, Any]:
    """A page of objects with ids, as OpenAI writes lists."""
    return {
        "object": "list",
        "data": list(items),
        "first_id": items[0]["id"] if items else None,
        "last_id": items[-1]["id"] if items else None,
        "has_more": has_more,
    }
