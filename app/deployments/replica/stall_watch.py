"""Tells whether an engine makes progress: it has to finish steps while somebody waits for tokens, and only then.

A request held for a slow client waits for nobody but that client (I9), so it says nothing about the engine. Nor does
time in which this process, and with it perhaps the whole machine, stood still: a late look counts as one of TURN_S.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from app.engine.step_limit import FLOOR_S

TURN_S = 1.0  # the longest that lies between two looks of a process that runs


class StallWatch:
    """Remembers when the number of finished steps last changed, or nobody waited for one."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._num_steps = 0
        self._looked_s = clock()
        self._stood_s = 0.0

    def progresses(self, num_steps: int, num_waiting: int, limit_s: Callable[[], float]) -> bool:
        """False once `num_waiting` requests have waited for longer than a step may take, FLOOR_S or more.

        `limit_s`, in seconds, is asked only where that may be so.
        """
        now = self._clock()
        passed_s, self._looked_s = min(TURN_S, now - self._looked_s), now
        if num_steps != self._num_steps or num_waiting == 0:
            self._num_steps, self._stood_s = num_steps, 0.0
        else:
            self._stood_s += passed_s
        return self._stood_s < FLOOR_S or self._stood_s < limit_s()
