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


def map_param(request: Request, name: str, max_members: int, max_key_chars: int, max_chars: int) -> dict[str, str]:
    """The members of an object, each given by a parameter of its own: `name[key]=value`."""
    found: dict[str, str] = {}
    for given, value in request.query_params.multi_items():
        if given.startswith(f"{name}["):
            key = given[len(name) + 1 : -1]
            if not given.endswith("]") or not key or len(key) > max_key_chars or len(value) > max_chars:
                raise InvalidRequestError(
                    f"expected {name}[key]=value, of at most {max_key_chars} and {max_chars} characters", param=name
                )
            found[key] = value
        elif given == name:
            raise InvalidRequestError(f"expected {name}[key]=value", param=name)
    if len(found) > max_members:
        raise InvalidRequestError(f"at most {max_members} keys", param=name)
    return found


def no_other_params(request: Request, *known: str) -> None:
    """InvalidRequestError for the first parameter that is none of these."""
    if unknown := [name for name in request.query_params if name not in known]:
        takes = f"; known: {', '.join(known)}" if known else ""
        raise InvalidRequestError(f"unknown query parameter {unknown[0][:MAX_CHARS]!r}{takes}", param=unknown[0][:64])


def page_of(
    request: Request, items: Sequence[dict[str, Any]], *, newest_first: bool
) -> tuple[list[dict[str, Any]], bool]:
    """The page that the parameters `limit`, `after` and `order` name, of objects in the order of their making, and
    whether there are more. `newest_first` says what order is meant where none is given."""
    order = choice_param(request, "order", ("desc", "asc") if newest_first else ("asc", "desc"))
    limit, after = int_param(request, "limit", 20, 1, 100), text_param(request, "after")
    shown = items if order == "asc" else items[::-1]
    ids = [item["id"] for item in shown]
    if after is not None and after not in ids:
        raise InvalidRequestError(f"there is no item {after!r}", param="after")
    start = ids.index(after) + 1 if after is not None else 0
    return list(shown[start : start + limit]), start + limit < len(shown)


def list_page(items: Sequence[dict[str, Any]], has_more: bool) -> dict[str, Any]:
    """A page of objects with ids, as OpenAI writes lists."""
    return {
        "object": "list",
        "data": list(items),
        "first_id": items[0]["id"] if items else None,
        "last_id": items[-1]["id"] if items else None,
        "has_more": has_more,
    }
