"""What is set aside is no longer looked at, and is freed all the same where memory is wanted back."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from app import heap


class Node:
    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    yield
    heap._is_settled = False
    gc.unfreeze()


def test_a_settled_heap_is_not_looked_at() -> None:
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
    gone = weakref.ref(node)
    del node
    heap.collect_heap()
    assert gone() is None
    assert len(gc.get_objects()) > 10_000
