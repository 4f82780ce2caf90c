"""Turns of a request's pieces: how many are heard side by side, as far as there is memory for their features."""

from __future__ import annotations

import asyncio

from app.api.http.held_bytes import Holding


class Turns:
    """At most `most` at a time. Each holds `num_bytes` while it lasts; one always runs, others beside it only where
    there is room, so a long sound takes longer where memory is short, and is never refused in its midst."""

    def __init__(self, most: int, holding: Holding, num_bytes: int) -> None:
        self._most = max(1, most)
        self._holding = holding
        self._num_bytes = num_bytes
        self._num_running = 0
        self._waiting = asyncio.Lock()  # its queue: turns are taken in the order in which they were asked for
        self._ended = asyncio.Event()

    async def take(self) -> None:
        """Wait for a turn."""
        async with self._waiting:
            while not self._may_begin():
                self._ended.clear()
                await self._ended.wait()
            self._num_running += 1

    @property
    def num_bytes(self) -> int:
        """Bytes that all of them hold now."""
        return self._num_running * self._num_bytes

    def _may_begin(self) -> bool:
        if not self._num_running:
            self._holding.take(self._num_bytes)
            return True
        return self._num_running < self._most and self._holding.grow(self._num_bytes)

    def give_back(self) -> None:
        """A piece is done, and its features are gone."""
        self._num_running -= 1
        self._holding.give_back(self._num_bytes)
        self._ended.set()
