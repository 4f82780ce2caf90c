"""Query parameters: what is out of bounds is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from starlette.requests import Request

from app.api.query import bool_param, choice_param, int_param, text_param
from app.errors import InvalidRequestError


def asked(query: str) -> Request:
    return Request({"type": "http", "query_string": query.encode(), "headers": []})


def test_what_is_given_and_what_is_not() -> None:
    request = asked("after=file-1&limit=20&stream=true&order=asc")
    assert text_param(request, "after") == "file-1"
    assert text_param(request, "before") is None
    assert int_param(request, "limit", 10, 1, 100) == 20
    assert int_param(request, "most", 10, 1, 100) == 10
    assert bool_param(request, "stream")
    assert not bool_param(request, "other")
    assert choice_param(request, "order", ("desc", "asc")) == "asc"
    assert choice_param(request, "by", ("time", "size")) == "time"


@pytest.mark.parametrize(
    ("query", "read"),
    [
        ("x=" + "a" * 257, lambda request: text_param(request, "x")),
        ("x=0", lambda request: int_param(request, "x", 10, 1, 100)),
        ("x=101", lambda request: int_param(request, "x", 10, 1, 100)),
        ("x=-1", lambda request: int_param(request, "x", 10, 1, 100)),
        ("x=%D9%A3", lambda request: int_param(request, "x", 10, 1, 100)),  # a digit, but not of ours
        ("x=" + "9" * 5000, lambda request: int_param(request, "x", 10, 1, 100)),
        ("x=1", lambda request: bool_param(request, "x")),
        ("x=b", lambda request: choice_param(request, "x", ("a",))),
    ],
)
def test_what_is_out_of_bounds(query: str, read: Callable[[Request], Any]) -> None:
    with pytest.raises(InvalidRequestError) as error:
        read(asked(query))
    assert error.value.param == "x"
