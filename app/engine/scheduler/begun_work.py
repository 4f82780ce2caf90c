"""Measures how much of the queued work begins in a second, while there is some: what a queue's length means in time."""

from __future__ import annotations

WINDOW_S = 1.0  # the shortest that is measured
WEIGHT = 0.3  # of the newest window


class BegunWork:
    """The work of one queue, or of one tenant in it, in estimated seconds; `rate` 0 means not measured."""

    def __init__(self) -> None:
        self.rate = 0.0
        self._since: float | None = None
        self._work_s = 0.0

    def start(self, now: float) -> None:
        """Something waits, where nothing did."""
        if self._since is None:
            self._since, self._work_s = now, 0.0

    def stop(self) -> None:
        """Nothing waits any more: the rate says nothing from here on."""
        self._since = None

    def note_start(self, work_s: float, now: float) -> None:
        """Count the work of one that waited and is served now."""
        if self._since is None:
            return
        self._work_s += work_s
        if (elapsed_s := now - self._since) >= WINDOW_S:
            newest = self._work_s / elapsed_s
            self.rate = newest if not self.rate else self.rate + WEIGHT * (newest - self.rate)
            self._since, self._work_s = now, 0.0
