"""The store of what tenants keep: whose room it is, who owns an entry, what a chain and a page are."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from app.api.store.entries import Birth, Lease, Seen, StorageFullError, StoreConflictError, StoreLimits
from app.api.store.local_store import LocalStore
from app.errors import MantaError, OverloadedError


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


def work(act: Callable[[], Any]) -> int:
    """Instructions of Python that a call takes."""
    count = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        act()
    finally:
        sys.settrace(before)
    return count


def full_store(num_tenants: int, num_own: int) -> LocalStore:
    """Of so many tenants with an entry each, and one with `num_own`; no room is left."""
    store = evicting(num_tenants + num_own, 1 << 30)
    for number in range(num_tenants):
        store.put(f"t{number}", "a", b"", expires_s=1e6)
    for number in range(num_own):
        store.put("own", str(number), b"", expires_s=1e6, born=Birth(label="batch"))
    return store


@pytest.mark.parametrize(
    "act",
    [
        lambda store: store.put("new", "a", b"x" * 10),  # which evicts
        lambda store: store.put("new", "a", b"x", lease=Lease("me", 1.0), born=Birth(max_owned=4)),
        lambda store: store.put("own", "more", b"x", lease=Lease("me", 1.0), born=Birth(max_owned=4)),
        lambda store: store.check_room("new", 10),
        lambda store: store.page("own", None, 5, newest_first=True, label="batch", only_finished=True),
        lambda store: store.page("own", "20", 5, newest_first=False),
        lambda store: store.claim("me", 1.0),
        lambda store: store.delete("own", "20"),
    ],
)
def test_a_call_s_work_does_not_grow_with_what_is_kept(act: Callable[[LocalStore], Any]) -> None:
    few, many = full_store(60, 60), full_store(3000, 3000)
    assert work(lambda: act(many)) < 3 * work(lambda: act(few))


def test_the_orders_are_those_of_the_entries() -> None:
    """After anything that can happen, each page, count and owner is what a look at all entries says."""
    clock, draw = Clock(), random.Random(5)
    store = LocalStore(StoreLimits(40, 900, 30, 700, evicts=True), clock)
    for _ in range(6000):
        tenant, key = draw.choice("abcde"), str(draw.randrange(12))
        size, owner = draw.randrange(60), draw.choice(["", "me"])
        with contextlib.suppress(MantaError):
            match draw.randrange(8):
                case 0 | 1 | 2:
                    expires_s = draw.choice([None, None, 5.0, 0.0])
                    born = Birth(label=draw.choice(["", "x", "y"]))
                    store.put(tenant, key, b"x" * size, lease=Lease(owner, 3.0), expires_s=expires_s, born=born)
                case 3:
                    store.append(tenant, key, [b"y" * size], "me")
                case 4:
                    store.delete(tenant, key)
                case 5:
                    store.claim("other", 3.0)
                case 6:
                    store.take(tenant, key, "me", 2.0)
                case _:
                    clock.now += 0.5
        label, newest = draw.choice(["", "x", "y"]), draw.random() < 0.5
        page = [stored.key for stored in store.page(tenant, None, 99, newest_first=newest, label=label)]
        held = store._tenants[tenant].entries if tenant in store._tenants else {}
        there = sorted(held, key=lambda key: held[key].created, reverse=newest)
        assert page == [key for key in there if label in ("", held[key].label)]
    tenants = store._tenants.values()
    assert len(store) == sum(len(tenant.entries) for tenant in tenants) <= 40
    assert store._num_bytes == sum(entry.num_bytes for tenant in tenants for entry in tenant.entries.values()) <= 900
    owned = {(name, key) for name, one in store._tenants.items() for key, entry in one.entries.items() if entry.owner}
    assert set(store._under_way) == owned
    for order, size in (store._by_entries, store._entries_of), (store._by_bytes, store._bytes_of):
        named = [name for _, name in order.descending()]
        assert sorted(named) == sorted(store._tenants)
        assert [size(name) for name in named] == sorted(map(size, named), reverse=True)  # type: ignore[type-var]
        assert len(order._heap) < 200, "what is no longer true does not stay"
    assert len(store._dues._heap) < 200


def test_entries_are_joined_once_and_leave_nothing_behind() -> None:
    store = LocalStore(StoreLimits(8, 100, 8, 100))
    for key, chunk in (("a", b"x" * 30), ("b", b"y" * 30)):
        store.put("t", key, b"{}", append=[chunk], lease=Lease("me", 9.0), born=Birth(label="parts"))
    store.put("t", "other", b"{}", lease=Lease("you", 9.0))
    for parts, owner in ((["a", "c"], "me"), (["a", "other"], "me"), (["a"], "you")):
        with pytest.raises(StoreConflictError):
            store.join("t", "whole", b"h", parts, owner)
    with pytest.raises(StorageFullError):
        store.join("t", "whole", b"h" * 40, ["a", "b"], "me")
    assert [entry.key for entry in store.page("t", None, 9, newest_first=False)] == ["a", "b", "other"]
    for _ in range(2):
        assert store.join("t", "whole", b"h", ["b", "a"], "me", born=Birth(label="files")) == 1
        assert store.read("t", "whole", 0, 1000) == [b"y" * 30, b"x" * 30]
    assert [entry.key for entry in store.page("t", None, 9, newest_first=False)] == ["other", "whole"]
    assert store.page("t", None, 9, newest_first=False, label="parts") == []
    assert store._tenants["t"].ages.keys() == {"", "files"}, "a label that nothing has any more is forgotten"
    store.put("t", "fits", b"z" * 37)
    with pytest.raises(StorageFullError):
        store.put("t", "no more", b"z")
