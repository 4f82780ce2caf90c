"""Runs a call that may not end, in the thread that asks, and takes the thread back when its time is over.

One thread watches all such calls and interrupts those that are late, by CPython's own way to raise an exception in
another thread: between two instructions of Python. So a loop of Python ends; a single operation of C does not.
"""

from __future__ import annotations

import ctypes
import heapq
import math
import threading
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
AGAIN_S = 1.0  # until a call that has not ended is interrupted again: something may have swallowed the first time


class OverrunError(Exception):
    """A call took too long; `by_cpu`: by the time that it computed, not by the clock."""

    def __init__(self, by_cpu: bool) -> None:
        super().__init__()
        self.by_cpu = by_cpu


class _Interrupt(BaseException):
    """Is raised inside a call that is late. No handler of errors takes it for one."""


def run_watched(call: Callable[[], T], max_s: float, max_cpu_s: float = math.inf) -> T:
    """Returns or raises what `call` does; OverrunError when it takes longer than `max_s`, or computes longer than
    `max_cpu_s`, which is told while others have the machine, too."""
    if max_s == max_cpu_s == math.inf:
        return call()
    run = _Run(max_s, max_cpu_s)
    try:
        try:
            _WATCH.add(run, run.check_in_s())  # from here on an interrupt may come
            result = call()
        finally:
            run.settle()
        if run.is_past:
            raise OverrunError(by_cpu=False)
        return result
    except _Interrupt:
        while True:
            try:
                run.settle()
                break
            except _Interrupt:
                continue
        raise OverrunError(run.is_late_by_cpu) from None


class _Run:
    """One call, and how long it may take."""

    def __init__(self, max_s: float, max_cpu_s: float) -> None:
        self.is_late_by_cpu = False
        self._thread_id = threading.get_ident()
        self._until = time.monotonic() + max_s
        self._cpu_clock = time.pthread_getcpuclockid(self._thread_id)
        self._until_cpu_s = time.clock_gettime(self._cpu_clock) + max_cpu_s
        self._lock = threading.Lock()
        self._has_ended = False
        self._is_interrupted = False

    @property
    def is_past(self) -> bool:
        """Says whether its time by the clock is over."""
        return time.monotonic() > self._until

    def check_in_s(self) -> float:
        """Seconds until it can be late at the earliest."""
        return min(self._until - time.monotonic(), self._until_cpu_s - time.clock_gettime(self._cpu_clock))

    def check(self) -> float | None:
        """Interrupt the call if it is late; in how many seconds to look again, None: it has ended. For the watch."""
        with self._lock:
            if self._has_ended:
                return None
            left_s = self.check_in_s()
            if left_s > 0.0:
                return left_s
            if not self._is_interrupted:
                self.is_late_by_cpu = not self.is_past
            self._is_interrupted = True
            _raise_in(self._thread_id, _Interrupt)
            return AGAIN_S

    def settle(self) -> None:
        """The call has ended: no interrupt comes any more, nor is one on its way. For the call's own thread."""
        with self._lock:
            self._has_ended = True
        if self._is_interrupted:
            _take_in(self._thread_id)


def _raise_in(thread_id: int, kind: type[BaseException]) -> None:
    """Raise `kind` in a thread as soon as it gets to it; it replaces one that the thread has not got to."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread_id), ctypes.py_object(kind))


def _take_in(thread_id: int) -> None:
    """Let this thread get to an interrupt that may be on its way. It is not taken back by raising nothing: CPython 3.11
    would note for good that an exception waits, and loop for ever in the next function that is traced."""
    try:
        _raise_in(thread_id, _Interrupt)
        while True:  # it is raised before the next turn
            pass
    except _Interrupt:
        return


class _Watch:
    """The thread that watches. It starts with the first call."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._looks: list[tuple[float, int, _Run]] = []  # a heap: when to look at what
        self._num_added = 0
        self._thread: threading.Thread | None = None

    def add(self, run: _Run, in_s: float) -> None:
        """Look at a call in so many seconds."""
        with self._condition:
            if self._thread is None or not self._thread.is_alive():  # a fork has no threads
                self._thread = threading.Thread(target=self._watch, name="watch", daemon=True)
                self._thread.start()
            self._num_added += 1
            heapq.heappush(self._looks, (time.monotonic() + in_s, self._num_added, run))
            # One that is overdue has not been looked at: the watch waits for too long, so it hears of that.
            if self._looks[0][2] is run or self._looks[0][0] < time.monotonic():
                self._condition.notify()

    def _watch(self) -> None:
        while True:
            run = self._next()
            if (in_s := run.check()) is not None:
                self.add(run, in_s)

    def _next(self) -> _Run:
        """The next call to look at, once it is time."""
        with self._condition:
            while not self._looks or self._looks[0][0] > time.monotonic():
                self._condition.wait(self._looks[0][0] - time.monotonic() if self._looks else None)
            return heapq.heappop(self._looks)[2]


_WATCH = _Watch()
