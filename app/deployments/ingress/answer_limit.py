"""The time that another process gets for an answer: longer on a machine that is busy, as its own answers show.

It is twice the slowest answer of late, which counts for half as much every HALF_LIFE_S; at least `least_s` and at most
LONGEST times that. A stall of this process is nobody else's fault: the time is counted in slices, and one that ends
late counts once.
"""

from __future__ import annotations

import asyncio
import math
import time
from typing import Any

HALF_LIFE_S = 60.0
LONGEST = 8  # times `least_s`
SLICES = 5


class AnswerLimit:
    """The limit for the next answer, by those before it."""

    def __init__(self, least_s: float) -> None:
        self._least_s = least_s
        self._slowest_s, self._at_s = 0.0, 0.0

    @property
    def seconds(self) -> float:
        """The limit for the next answer."""
        return min(max(self._least_s, 2 * self._remembered_s), LONGEST * self._least_s)

    @property
    def _remembered_s(self) -> float:
        return self._slowest_s * math.exp2((self._at_s - time.monotonic()) / HALF_LIFE_S)

    def learn(self, took_s: float) -> None:
        """Take an answer's time into account, that of a late one too."""
        if took_s >= self._remembered_s:
            self._slowest_s, self._at_s = took_s, time.monotonic()

    async def wait(self, task: asyncio.Future[Any]) -> bool:
        """Wait for a task, longer where others are learned to take longer meanwhile; True when it is done."""
        slice_s, waited_s = self._least_s / SLICES, 0.0
        while waited_s < self.seconds and not task.done():
            await asyncio.wait({task}, timeout=slice_s)
            waited_s += slice_s
        return task.done()
