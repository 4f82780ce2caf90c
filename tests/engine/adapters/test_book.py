"""Names of adapters, and which of them a name means."""

from __future__ import annotations

from app.engine.adapters.book import AdapterBook
from app.records.adapter import KnownAdapter


def test_names_and_what_they_mean() -> None:
    book = AdapterBook()
    one, other = KnownAdapter("a", "11" * 16, "/x"), KnownAdapter("a", "22" * 16, "/y")
    book.name(one)
    book.name(other)
    assert book.known == (other,)
    assert book.nameless == {bytes.fromhex(one.digest)}
    assert book.has("a", bytes.fromhex(other.digest))
    assert not book.has("a", bytes.fromhex(one.digest))
    assert book.forget("a")
    assert not book.forget("a")
