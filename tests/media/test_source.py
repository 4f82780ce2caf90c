"""Data URLs: what they hold, and how each wrong one is told apart."""

from __future__ import annotations

import base64
import tracemalloc

import pytest

from app.errors import InvalidRequestError, UnsupportedError
from app.media.source import file_of, is_fetched

WRONG = [
    ("ftp://a/b.png", UnsupportedError, "of 'ftp'"),
    ("file:///etc/passwd", UnsupportedError, "of 'file'"),
    ("picture.png", UnsupportedError, "is no data URL"),
    ("data:image/png;base64", InvalidRequestError, "has no comma"),
    ("data:" + "x" * 300 + ",", InvalidRequestError, "has no comma"),
    ("data:image/png;base64,ab!d", InvalidRequestError, "is not base64"),
    ("data:image/png;base64,abc", InvalidRequestError, "is not base64"),
    ("data:image/png;base64," + "A" * 4000, InvalidRequestError, "a picture may have 1000"),
    ("data:image/png," + "%41" * 1001, InvalidRequestError, "a picture may have 1000"),
]


@pytest.mark.parametrize(("url", "kind", "says"), WRONG)
def test_wrong_ones_say_why(url: str, kind: type[Exception], says: str) -> None:
    with pytest.raises(kind, match=says):
        file_of(url, 1000)


def test_what_they_hold() -> None:
    data = bytes(range(256))
    assert file_of("DATA:image/png;x=y;base64," + base64.b64encode(data).decode(), 256) == data
    assert file_of("data:,a%20b", 9) == b"a b"
    assert [is_fetched(url) for url in ("HTTPS://a", "http://a", "data:,http://a")] == [True, True, False]


def test_a_long_one_is_hardly_copied() -> None:
    """One that is refused not at all, and one that is read once beside the file."""
    url = "data:image/png;base64," + "A" * (4 << 20)
    tracemalloc.start()
    try:
        with pytest.raises(InvalidRequestError, match="a picture may have 1000"):
            file_of(url, 1000)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
        tracemalloc.reset_peak()
        assert len(file_of(url, 4 << 20)) == 3 << 20
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()
