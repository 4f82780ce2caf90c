"""Query parameters: what is out of bounds is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from starlette.requests import Request

from app.api.http.query import bool_param, choice_param, int_param, map_param, page_of, text_param
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


def test_the_members_of_an_object() -> None:
    assert map_param(asked("m[a]=1&m[b]=&n[c]=2"), "m", 2, 8, 8) == {"a": "1", "b": ""}
    for query in ("m=1", "m[]=1", "m[a=1", "m[a]=123456789", "m[123456789]=1", "m[a]=1&m[b]=2&m[c]=3"):
        with pytest.raises(InvalidRequestError) as error:
            map_param(asked(query), "m", 2, 8, 8)
        assert error.value.param == "m"


def test_pages_of_what_is_there() -> None:
    items = [{"id": str(i)} for i in range(5)]

    def page(query: str, *, newest_first: bool = False) -> tuple[list[str], bool]:
        found, has_more = page_of(asked(query), items, newest_first=newest_first)
        return [item["id"] for item in found], has_more

    assert page("limit=2") == (["0", "1"], True)
    assert page("limit=2&after=2") == (["3", "4"], False)
    assert page("order=desc&limit=1&after=4") == (["3"], True)
    assert page("", newest_first=True) == (["4", "3", "2", "1", "0"], False)
    with pytest.raises(InvalidRequestError):
        page("after=9")
