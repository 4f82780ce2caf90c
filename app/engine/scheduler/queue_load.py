"""How much the waiting requests still have to compute, as numpy columns: summed ten times a second, however many wait.

What the prefix cache knows of a request changes while it waits. Each step looks at a few again, in turn, so a figure is
at most as old as it takes to come round; nothing walks the whole queue.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from app.engine.scheduler.request import Request

REFRESHED_PER_STEP = 4
NUM_COLUMNS = 3  # tokens to compute, tokens that may still be generated, tokens generated
IntColumn = NDArray[np.integer[Any]]


class QueueLoad:
    """Written by the engine's thread; `outstanding` may be called from any."""

    def __init__(self, num_known_tokens: Callable[[Request], int]) -> None:
        """`num_known_tokens(request)`: its leading tokens that need no computing."""
        self._num_known_tokens = num_known_tokens
        self._requests: list[Request] = []
        self._places: dict[Request, int] = {}
        self._columns = np.zeros((NUM_COLUMNS, 64), np.int64)
        self._next = 0
        self.num_paused = 0  # waiting ones that are held for a slow client

    def add(self, request: Request) -> None:
        """A request begins to wait."""
        place = self._places[request] = len(self._requests)
        self._requests.append(request)
        if place == self._columns.shape[1]:
            self._columns = np.concatenate((self._columns, np.zeros_like(self._columns)), axis=1)
        self._look_at(place)
        self.num_paused += request.paused

    def remove(self, request: Request) -> None:
        """It waits no longer; the last one takes its place."""
        place, last = self._places.pop(request), self._requests.pop()
        self._columns[:, place] = self._columns[:, len(self._requests)]
        self._columns[:, len(self._requests)] = 0
        if last is not request:
            self._requests[place], self._places[last] = last, place
        self.num_paused -= request.paused

    def refresh(self, count: int = REFRESHED_PER_STEP) -> None:
        """Measure the next `count` requests again."""
        for _ in range(min(count, len(self._requests))):
            self._next = (self._next + 1) % len(self._requests)
            self._look_at(self._next)

    def outstanding(self, expected_output_tokens: float) -> tuple[int, int]:
        """Tokens to compute of what is known, and to generate (see `expected_rest`)."""
        to_compute, room, done = self._columns[:, : len(self._requests)]
        return int(to_compute.sum()), expected_rest(room, done, expected_output_tokens)

    def _look_at(self, place: int) -> None:
        request = self._requests[place]
        self._columns[:, place] = (
            request.num_tokens - self._num_known_tokens(request),
            request.max_total_tokens - request.num_tokens,
            request.num_output_tokens,
        )


def expected_rest(room: IntColumn, done: IntColumn, expected_output_tokens: float) -> int:
    """Output tokens still to come of requests [n] that have `done` and may generate `room` more: up to the usual length
    of an answer, and at least one."""
    usual = round(expected_output_tokens)
    return int(np.minimum(room, np.maximum(1, usual - done)).sum())
