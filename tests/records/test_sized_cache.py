"""What was used longest ago goes first, and no more is kept than fits."""

from __future__ import annotations

from app.records.sized_cache import SizedCache


def test_the_least_recently_used_goes_first() -> None:
    cache: SizedCache[str] = SizedCache(10)
    cache.keep(b"a", "A", 4)
    cache.keep(b"b", "B", 4)
    assert cache.find(b"a") == "A"
    cache.keep(b"c", "C", 5)
    assert (cache.find(b"a"), cache.find(b"b"), cache.find(b"c")) == ("A", None, "C")
    cache.keep(b"d", "D", 11)
    assert cache.find(b"d") is None
    assert cache.size == 9
    cache.clear()
    assert (cache.find(b"a"), cache.size) == (None, 0)
