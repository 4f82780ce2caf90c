"""Keeps retries from making an overload worse: they are let in as a share of what comes for the first time.

As in Finagle's and Linkerd's retry budgets, with a reserve for when little comes.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

WINDOW_S = 10.0


class RetryBudget:
    """`share` of the first attempts of the last WINDOW_S seconds, and `min_per_s` a second beside."""

    def __init__(self, share: float, min_per_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._share = share
        self._min_per_s = min_per_s
        self._clock = clock
        self._seconds: deque[list[int]] = deque()  # [second, first attempts, retries], of the last WINDOW_S
        self._first = self._retries = 0  # in all of them

    def count_first(self) -> None:
        """Count a request that comes for the first time."""
        self._now()[1] += 1
        self._first += 1

    def take(self) -> bool:
        """Takes a retry from the budget; True if it is let in, and then it counts."""
        second = self._now()
        if self._retries + 1 > self._share * self._first + self._min_per_s * WINDOW_S:
            return False
        second[2] += 1
        self._retries += 1
        return True

    def _now(self) -> list[int]:
        now = int(self._clock())
        if not self._seconds or self._seconds[-1][0] != now:
            self._seconds.append([now, 0, 0])
        while self._seconds[0][0] <= now - WINDOW_S:
            _, first, retries = self._seconds.popleft()
            self._first -= first
            self._retries -= retries
        return self._seconds[-1]
