"""Says how far the weights of a large model have come: lines in the log, since bars do not survive Ray's consoles.

A model that loads within SILENT_S is loaded without a word.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

logger = logging.getLogger("manta.weights")

SILENT_S = 2.0
INTERVAL_S = 2.0


class LoadProgress:
    """Counts tensors and bytes of `num_tensors` and `num_bytes`; `clock` gives seconds."""

    def __init__(self, num_tensors: int, num_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._num_tensors = num_tensors
        self._num_bytes = num_bytes
        self._clock = clock
        self._began = clock()
        self._next = self._began + SILENT_S
        self._done = 0

    def tensor(self) -> None:
        """Count one loaded tensor."""
        self._done += 1
        now = self._clock()
        if now < self._next:
            return
        self._next = now + INTERVAL_S
        share = self._done / self._num_tensors
        elapsed_s = now - self._began
        logger.info(
            "weights: %3.0f %% of %.1f GiB, %d of %d tensors, %.0f s, about %.0f s left",
            *(100 * share, self._num_bytes / 2**30, self._done, self._num_tensors),
            *(elapsed_s, elapsed_s * (1 - share) / share),
        )
