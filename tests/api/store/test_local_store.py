"""The store of what tenants keep: whose room it is, who owns an entry, what a chain and a page are."""

from __future__ import annotations

import pytest

from app.api.store.entries import Birth, Lease, Seen, StorageFullError, StoreConflictError, StoreLimits
from app.api.store.local_store import LocalStore
from app.errors import OverloadedError


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def evicting(entries: int, num_bytes: int, clock: Clock | None = None) -> LocalStore:
    return LocalStore(StoreLimits(entries, num_bytes, entries, num_bytes, evicts=True), clock or Clock())


def test_what_was_not_used_for_longest_goes_first() -> None:
    store = evicting(3, 100)
    store.put("t", "a", b"x" * 30)
    store.put("t", "b", b"x" * 30, born=Birth("a"))
    store.put("t", "c", b"x" * 30)
    assert [stored.key for stored, _ in store.chain("t", "b", 10, 1000)] == ["a", "b"]
    store.put("t", "d", b"x" * 30)  # `c` is now the one unused for longest
    assert store.get("t", "c") is None
    assert store.get("other", "b") is None
    store.put("t", "e", b"x" * 90)
    assert len(store) == 1
    with pytest.raises(StorageFullError):
        store.put("t", "f", b"x" * 101)
    assert store.delete("t", "e")
    assert not store.delete("t", "e")
    assert store.chain("t", "b", 10, 1000) == []


@pytest.mark.parametrize(("entries", "num_bytes"), [(10, 10_000), (1000, 1000)])
def test_a_tenant_cannot_drive_out_one_that_holds_less(entries: int, num_bytes: int) -> None:
    store = evicting(entries, num_bytes)
    for i in range(3):
        store.put("small", f"s{i}", b"x" * 90)
    for i in range(100):
        store.put("large", f"l{i}", b"x" * 90)
        store.put("third", f"t{i}", b"x" * 90) if i < 3 else None
    assert all(store.get("small", f"s{i}") for i in range(3))
    assert all(store.get("third", f"t{i}") for i in range(3))
    assert store.get("large", "l99")
    assert not store.get("large", "l0")


def test_one_that_does_not_evict_refuses() -> None:
    store = LocalStore(StoreLimits(4, 100, 2, 60), Clock())
    store.put("a", "1", b"x" * 30, append=[b"y" * 20])
    with pytest.raises(StorageFullError, match="50 bytes of yours"):
        store.put("a", "2", b"x" * 20)
    store.put("a", "2", b"x")
    with pytest.raises(StorageFullError):
        store.put("a", "3", b"")
    store.put("b", "1", b"x" * 45)
    with pytest.raises(StorageFullError, match="96 bytes"):
        store.put("c", "1", b"x" * 10)
    assert len(store) == 3


def test_an_owner_works_alone_and_is_missed() -> None:
    clock = Clock()
    store = evicting(2, 1000, clock)
    version = store.put("t", "job", b"begun", append=[b"0"], lease=Lease("one", 8.0), seen=Seen(0))
    with pytest.raises(StoreConflictError):
        store.put("t", "job", b"again", seen=Seen(0))
    with pytest.raises(StoreConflictError):
        store.append("t", "job", [b"1"], "two")
    assert store.append("t", "job", [b"1", b"2"], "one") == 3
    for i in range(3):
        store.put("t", f"other{i}", b"")  # what is worked on is not evicted
    assert store.read("t", "job", 1, 1000) == [b"1", b"2"]
    assert store.read("t", "job", 0, 1) == [b"0"]
    assert store.claim("two", 8.0) is None
    clock.now = 7.0
    assert store.renew("t", "job", "one", 8.0) == version
    clock.now = 15.0
    stored = store.get("t", "job")
    assert stored is not None
    assert stored.is_lost
    claimed = store.claim("two", 8.0)
    assert claimed is not None
    assert (claimed[0], claimed[1].key, claimed[1].owner, claimed[1].is_lost) == ("t", "job", "two", False)
    for refused in (lambda: store.renew("t", "job", "one", 8.0), lambda: store.append("t", "job", [b"3"], "one")):
        with pytest.raises(StoreConflictError):
            refused()
    assert store.put("t", "job", b"ended", seen=Seen(claimed[1].version)) == claimed[1].version + 1


def test_chains_and_pages_are_bounded() -> None:
    clock = Clock()
    store = evicting(100, 10_000, clock)
    for i in range(10):
        store.put("t", str(i), b"x" * 10, append=[b"%d" % i], born=Birth(str(i - 1) if i else None, str(i % 2)))
    assert [first for _, first in store.chain("t", "9", 100, 10_000)] == [b"%d" % i for i in range(10)]
    few = store.chain("t", "9", 3, 10_000)
    assert ([stored.key for stored, _ in few], few[0][0].previous) == (["7", "8", "9"], "6")
    assert len(store.chain("t", "9", 100, 30)) < 5
    assert [stored.key for stored in store.page("t", None, 3, newest_first=True)] == ["9", "8", "7"]
    assert [stored.key for stored in store.page("t", "7", 3, newest_first=True)] == ["6", "5", "4"]
    assert [stored.key for stored in store.page("t", "3", 9, newest_first=False, label="1")] == ["5", "7", "9"]
    assert store.page("nobody", None, 3, newest_first=True) == []
    with pytest.raises(StoreConflictError):
        store.page("t", "gone", 3, newest_first=True)
    store.put("t", "brief", b"", expires_s=5.0)
    clock.now = 5.0
    assert store.get("t", "brief") is None
    store.put("t", "brief", b"", expires_s=5.0)
    clock.now = 100.0
    assert store.page("t", None, 1, newest_first=True)[0].key == "9"


def test_what_names_its_place_may_be_asked_again() -> None:
    """Whoever does not know whether a call was done repeats it; nothing is there twice."""
    store = evicting(10, 1000)
    for _ in range(2):
        assert store.put("t", "a", b"1", append=[b"x"], seen=Seen(0), lease=Lease("me", 1.0)) == 1
    for _ in range(2):
        assert store.append("t", "a", [b"y", b"z"], "me", at=1) == 3
    with pytest.raises(StoreConflictError, match="3 chunks"):
        store.append("t", "a", [b"other"], "me", at=1)
    with pytest.raises(StoreConflictError, match="grown"):
        store.put("t", "a", b"2", seen=Seen(1, 2))
    for _ in range(2):
        assert store.put("t", "a", b"2", append=[b"end"], seen=Seen(1, 3)) == 2
    for other in ({"append": [b"other"]}, {"lease": Lease("other", 0.0)}):
        with pytest.raises(StoreConflictError):
            store.put("t", "a", b"2", seen=Seen(1), **other)
    assert store.read("t", "a", 0, 100) == [b"x", b"y", b"z", b"end"]
    tail = store.tail("t", "a", 3, 100)
    assert tail is not None
    assert (tail.chunks, tail.is_owned, tail.is_lost) == ([b"end"], False, False)


def test_a_page_leaves_out_what_is_worked_on() -> None:
    """And is full nevertheless."""
    store = evicting(10, 1000)
    for i in range(6):
        store.put("t", str(i), b"", lease=Lease("me" if i > 2 else "", 1.0))
    found = store.page("t", None, 2, newest_first=True, only_finished=True)
    assert [stored.key for stored in found] == ["2", "1"]


@pytest.mark.parametrize("keeps_lost", [False, True])
def test_what_nobody_works_on_any_more_counts_only_where_it_waits_for_another(keeps_lost: bool) -> None:
    clock = Clock()
    store = LocalStore(StoreLimits(9, 900, 9, 900, evicts=True, keeps_lost=keeps_lost), clock)
    for key in "ab":
        store.put("t", key, b"x", lease=Lease(key, 8.0), born=Birth(max_owned=2))
    with pytest.raises(OverloadedError, match="2 of yours are under way"):
        store.put("t", "c", b"x", lease=Lease("c", 8.0), born=Birth(max_owned=2))
    clock.now = 9.0  # their server died
    if keeps_lost:
        with pytest.raises(OverloadedError):
            store.put("t", "c", b"x", lease=Lease("c", 8.0), born=Birth(max_owned=2))
    else:
        store.put("t", "c", b"x", lease=Lease("c", 8.0), born=Birth(max_owned=2))
