"""Child processes that end with this one, however it ends, and even while they are stopped (Linux).

The kernel sends the signal that a child asked for when the thread that made it ends (prctl(2), PR_SET_PDEATHSIG). So
one thread makes them all, and it is a daemon, which lives as long as the process: when the main thread returns, others
may still be using the children.
"""

from __future__ import annotations

import ctypes
import functools
import os
import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")
_PR_SET_PDEATHSIG = 1


def spawn(make: Callable[[], T]) -> T:
    """Call `make`, which makes a process, in that thread; raises what it raises."""
    made: Future[T] = Future()
    _work_of(os.getpid()).put((made, make))
    return made.result()


def end_with_the_parent() -> None:
    """Ask the kernel, in the child, for the signal."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


@functools.cache
def _work_of(pid: int) -> SimpleQueue[Any]:
    """Returns what the thread of process `pid` is to do: a fork has its parent's objects, but not its threads."""
    work: SimpleQueue[Any] = SimpleQueue()
    threading.Thread(target=_serve, args=(work,), name=f"spawner-{pid}", daemon=True).start()
    return work


def _serve(work: SimpleQueue[Any]) -> None:
    while True:
        made, make = work.get()
        try:
            made.set_result(make())
        except BaseException as error:
            made.set_exception(error)
        del made, make  # they hold the executor
