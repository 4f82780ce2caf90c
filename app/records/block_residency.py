"""Measures how long KV blocks stay, for the metrics: one block in EVERY is watched, so that the others cost nothing.

A watched block's life begins when it is handed out and ends when its content is evicted for another one. Those that
were never cached, or whose request still runs, say nothing about the prefix cache and are not counted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection

EVERY = 64


class BlockResidency:
    """Watches the blocks of one pool; called on the engine's thread, for blocks of which it has some `watched`."""

    def __init__(self, num_blocks: int, clock: Callable[[], float] = time.monotonic, every: int = EVERY) -> None:
        self.watched = frozenset(range(0, num_blocks, every))
        self._clock = clock
        self._born: dict[int, float] = {}
        self._used: dict[int, float] = {}
        self._samples: dict[str, list[float]] = {}  # seconds, under the names that METRICS reads

    def note_taken(self, blocks: Collection[int]) -> None:
        """Note that these blocks are handed out."""
        now = self._clock()
        for block in self.watched.intersection(blocks):
            self._born[block] = self._used[block] = now

    def note_reuse(self, blocks: Collection[int]) -> None:
        """Note that a prefix hit takes these cached blocks."""
        now = self._clock()
        for block in self.watched.intersection(blocks):
            self._note("reuse_gap_s", now - self._used[block])
            self._used[block] = now

    def note_eviction(self, blocks: Collection[int]) -> None:
        """Note that the content of these cached blocks is given up."""
        now = self._clock()
        for block in self.watched.intersection(blocks):
            self._note("lifetime_s", now - self._born[block])
            self._note("idle_s", now - self._used[block])

    def take_samples(self) -> dict[str, list[float]]:
        """Returns what was seen since the last call."""
        samples, self._samples = self._samples, {}
        return samples

    def _note(self, name: str, seconds: float) -> None:
        self._samples.setdefault(name, []).append(seconds)
