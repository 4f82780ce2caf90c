"""What is set aside is no longer looked at, and is freed all the same where memory is wanted back."""

from __future__ import annotations

import gc
import platform
import subprocess
import sys
import weakref
from collections.abc import Iterator

import pytest

from app import heap
from tests import limits


class Node:
    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    yield
    heap._is_settled = False
    gc.unfreeze()
    gc.freeze()  # as tests/conftest.py has left it


def test_a_call_sets_aside_what_is_there_and_gives_it_back() -> None:
    gc.unfreeze()
    kept = Node()
    with heap.set_aside():
        assert gc.get_freeze_count() > 10_000
        gone = weakref.ref(Node())
        gc.collect()
        assert gone() is None, "what is made meanwhile is looked at"
        assert all(one is not kept for one in gc.get_objects())
    assert gc.get_freeze_count() == 0
    gc.freeze()
    with heap.set_aside():
        before = gc.get_freeze_count()
    assert gc.get_freeze_count() > before / 2, "what was aside before stays so, but for what a thread has freed"


def test_what_python_sets_aside_by_itself_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else Python 3.12, which does so with every collection, would set nothing aside."""
    gc.unfreeze()
    monkeypatch.setattr(gc, "get_freeze_count", lambda: 375)
    kept = Node()
    with heap.set_aside():
        assert all(one is not kept for one in gc.get_objects())
    assert any(one is kept for one in gc.get_objects())


def test_a_settled_heap_is_not_looked_at() -> None:
    gc.unfreeze()
    heap.settle_heap()
    before = gc.get_freeze_count()
    assert before > 10_000
    assert len(gc.get_objects()) < before / 10
    gc.collect()
    assert gc.get_freeze_count() >= before - 1_000, "a collection leaves it aside"


def test_cycles_of_before_go_where_memory_is_wanted() -> None:
    node = Node()
    gone = weakref.ref(node)
    heap.settle_heap()
    del node
    gc.collect()
    assert gone() is not None, "set aside"
    heap.collect_heap()
    assert gone() is None
    assert gc.get_freeze_count() > 10_000, "and the rest is set aside again"


def test_a_process_that_is_not_ours_keeps_its_collector() -> None:
    node = Node()
    gone, before = weakref.ref(node), gc.get_freeze_count()
    del node
    heap.collect_heap()
    assert gone() is None
    assert gc.get_freeze_count() <= before


ALLOCATE = """
import sys
import psutil
from app.heap import map_large_blocks
if sys.argv[1] == "mapped":
    map_large_blocks()
del_me = bytearray(30 << 20)
del del_me  # from now on glibc takes what is smaller from its heap
before, kept = psutil.Process().memory_info().rss, []
for _ in range(8):
    blocks = [b"x" * (8 << 20) for _ in range(4)]
    kept.append(b"y" * 100_000)  # at the end of the heap
    del blocks
print((psutil.Process().memory_info().rss - before) >> 20)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library, which gives large blocks back")
@pytest.mark.parametrize(("how", "grows"), [("left", True), ("mapped", False)])
def test_large_blocks_go_back_to_the_system(how: str, grows: bool) -> None:
    run = subprocess.run(
        [sys.executable, "-c", ALLOCATE, how], capture_output=True, text=True, check=True, timeout=limits.patience_s()
    )
    assert (int(run.stdout) > 16) == grows, f"{run.stdout} MiB are left"


def test_imports_are_not_collected() -> None:
    was_on = gc.isenabled()
    try:
        for is_on in (True, False):
            (gc.enable if is_on else gc.disable)()
            with heap.uncollected():
                assert not gc.isenabled()
            assert gc.isenabled() is is_on
    finally:
        (gc.enable if was_on else gc.disable)()
