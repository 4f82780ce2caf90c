from __future__ import annotations

from app.records.adapter import AdapterAsk


def test_blocks_are_told_apart_by_tenant_and_adapter() -> None:
    one, other = AdapterAsk("a", b"1" * 16), AdapterAsk("a", b"2" * 16)
    roots = {one.cache_root(b""), other.cache_root(b""), one.cache_root(b"tenant"), other.cache_root(b"tenant"), b""}
    assert len(roots) == 5
    assert one.cache_root(b"x") == AdapterAsk("another name", b"1" * 16).cache_root(b"x")
