"""Says how far the weights of a large model have come: lines in the log, since bars do not survive Ray's consoles.

A model that loads within SILENT_S is loaded without a word.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

logger = logging.getLogger("manta.weights")

SILENT_S = 2.0
INTERVAL_S = 2.0


class LoadProgress:
    """Counts the bytes that were read of `num_bytes`, from any thread; `clock` gives seconds."""

    def __init__(self, num_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._num_bytes = num_bytes
        self._clock = clock
        self._began = clock()
        self._next = self._began + SILENT_S
        self._done = 0
        self._lock = threading.Lock()

    def add(self, num_bytes: int) -> None:
        """Count bytes that were read."""
        with self._lock:
            self._done += num_bytes
            now = self._clock()
            if now < self._next or not self._done:
                return
            self._next = now + INTERVAL_S
            share = self._done / self._num_bytes
        elapsed_s = now - self._began
        logger.info(
            "weights: %3.0f %% of %.1f GiB, %.0f s, about %.0f s left",
            *(100 * share, self._num_bytes / 2**30, elapsed_s, elapsed_s * (1 - share) / share),
        )
