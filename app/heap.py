"""Memory of a process that serves: Python's garbage collector, and the C library's allocator below it.

A collection of all generations looks at every container that the process has: 200,000 after torch and transformers
were imported, which stops all threads for 60 - 120 ms in the midst of streams. What a start has made lives as long as
the process, so it is looked at once and then set aside.

glibc takes a large block from the system, and gives it back when it is freed; but once it has seen one of up to 32 MiB
freed, it takes all that are smaller from its heaps (mallopt(3), M_MMAP_THRESHOLD), which shrink from their ends only.
So a few long bodies and answers left an ingress hundreds of megabytes larger, for good.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterator
from contextlib import contextmanager

MAPPED_BYTES = 1 << 20  # blocks from here on are the system's
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # numbers of malloc.h

# Objects that Python sets aside by itself: some hundreds, 3.12 with every collection.
_PYTHONS_OWN = 10_000

_is_settled = False


def settle_heap() -> None:
    """At the end of a start, in a process of our own: what is there now is not looked at again."""
    global _is_settled
    _is_settled = True
    gc.collect()
    gc.freeze()


@contextmanager
def set_aside() -> Iterator[None]:
    """Within, collections look only at what was made since: for a call that makes many objects and few cycles. Where
    something is aside already, nothing changes."""
    if gc.get_freeze_count() > _PYTHONS_OWN:
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextmanager
def uncollected() -> Iterator[None]:
    """Within, Python does not look for garbage: for imports, nearly all of whose objects stay."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def map_large_blocks() -> None:
    """Have blocks of MAPPED_BYTES and more go back to the system when they are freed, whatever was freed before.

    Not where tensors are computed: each of a step's would be taken from the system anew. Other C libraries than glibc
    have no such threshold.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for option in (_MMAP_THRESHOLD, _TRIM_THRESHOLD):
            mallopt(option, MAPPED_BYTES)


def collect_heap() -> None:
    """Free all that is unreachable, also of what was set aside: device memory hangs on cycles of a start's objects."""
    gc.unfreeze()
    gc.collect()
    if _is_settled:
        gc.freeze()
