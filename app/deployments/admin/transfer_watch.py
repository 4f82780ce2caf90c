"""Measures how long a transfer of weights has stood still: a trainer that leaves in the midst of one must not hold
good."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class TransferWatch:
    """Sees every control call of one model that is part of a transfer; `limit_s`: seconds without one."""

    def __init__(self, limit_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.limit_s = limit_s
        self._clock = clock
        self._num_under_way = 0
        self._ended_at = clock()

    @contextmanager
    def during(self) -> Iterator[None]:
        """A call is made within the block."""
        self._num_under_way += 1
        try:
            yield
        finally:
            self._num_under_way -= 1
            self._ended_at = self._clock()

    @property
    def is_given_up(self) -> bool:
        """True if the sender has been silent for too long."""
        return not self._num_under_way and self._clock() - self._ended_at > self.limit_s
