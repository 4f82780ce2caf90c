"""The estimate of what a body costs: all its texts, and no walk through more than is needed to call it large."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel

from app.api.request_size import NODE_CHARS, size_of


class Message(BaseModel):
    role: str
    parts: list[str]


def test_every_text_counts() -> None:
    assert size_of("abc") == NODE_CHARS + 3
    assert size_of({"ab": ["cde", 7]}) == 5 * NODE_CHARS + 5
    assert size_of(Message(role="user", parts=["ab", "c"])) == 5 * NODE_CHARS + 7


def test_counting_stops_where_it_is_enough() -> None:
    class Counted(list[Any]):
        read = 0

        def __iter__(self) -> Iterator[Any]:
            for item in super().__iter__():
                Counted.read += 1
                yield item

    nested = Counted(["x" * 100] * 10)
    assert size_of([nested, Counted(["y"] * 1000), "z" * 1000], enough=500) > 500
    assert Counted.read < 1000
