"""Whether an engine makes progress: it has to finish steps while somebody waits for tokens, and only then.

A request held for a slow client waits for nobody but that client (I9), so it says nothing about the engine.
"""

from __future__ import annotations

import time
from collections.abc import Callable


class StallWatch:
    """Remembers when the number of finished steps last changed, or nobody waited for one."""

    def __init__(self, stall_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._stall_s = stall_s
        self._clock = clock
        self._num_steps = 0
        self._since_s = clock()

    def progresses(self, num_steps: int, num_waiting: int) -> bool:
        """False once `num_waiting` requests have waited `stall_s` seconds without any step being finished."""
        now = self._clock()
        if num_steps != self._num_steps or num_waiting == 0:
            self._num_steps, self._since_s = num_steps, now
        return now - self._since_s < self._stall_s
