"""Sums how much the waiting requests still have to compute, in numpy columns: ten times a second, however many wait.

What the prefix cache knows of a request changes while it waits. Each step looks at a few again, in turn, so a figure is
at most as old as it takes to come round; nothing walks the whole queue.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from app.engine.scheduler.begun_work import BegunWork
from app.records.request_state import Request
from app.records.stats import QueuedWork

REFRESHED_PER_STEP = 4
MAX_QUEUES = 64  # that are told apart in a report
NUM_COLUMNS = 4  # tokens to compute, tokens that may still be generated, tokens generated, tokens expected
IntColumn = NDArray[np.integer[Any]]


@dataclass(slots=True, eq=False)
class _TenantLoad:
    """Sums what waits of one tenant in one class."""

    share: float
    num_requests: int = 0
    to_compute: int = 0
    to_generate: int = 0
    begun: BegunWork = field(default_factory=BegunWork)


@dataclass(slots=True, frozen=True)
class WorkCosts:
    """Says what a token costs the whole engine, in seconds; 0 until measured."""

    prefill_token_s: float
    output_token_s: float  # a decode step over the requests that share it

    def work_s(self, num_prefill_tokens: float, num_output_tokens: float) -> float:
        """Seconds of the engine's work."""
        return num_prefill_tokens * self.prefill_token_s + num_output_tokens * self.output_token_s


class QueueLoad:
    """Written by the engine's thread; `outstanding` and `queued` may be called from any."""

    def __init__(
        self, num_known_tokens: Callable[[Request], int], expected_output_tokens: Callable[[], float] = lambda: 0.0
    ) -> None:
        """`num_known_tokens(request)`: its leading tokens that need no computing. `expected_output_tokens()`: the usual
        length of an answer."""
        self.begun = BegunWork()
        self._num_known_tokens = num_known_tokens
        self._expected_output_tokens = expected_output_tokens
        self._tenants: dict[tuple[str, str], _TenantLoad] = {}
        self._requests: list[Request] = []
        self.num_requests = 0
        self.to_compute = 0  # tokens of what is known
        self._places: dict[Request, int] = {}
        self._columns = np.zeros((NUM_COLUMNS, 64), np.int64)
        self._next = 0
        self.num_paused = 0  # waiting ones that are held for a slow client

    def add(self, request: Request, now: float = 0.0) -> None:
        """A request begins to wait."""
        placement = request.spec.placement
        key = placement.service_class.name, placement.tenant
        tenant = self._tenants.setdefault(key, _TenantLoad(placement.service_class.share))
        tenant.num_requests += 1
        tenant.begun.start(now)
        self.begun.start(now)
        place = self._places[request] = len(self._requests)
        self._requests.append(request)
        self.num_requests += 1
        if place == self._columns.shape[1]:
            self._columns = np.concatenate((self._columns, np.zeros_like(self._columns)), axis=1)
        self._look_at(place)
        self.num_paused += request.paused

    def remove(self, request: Request) -> None:
        """It waits no longer; the last one takes its place."""
        place, last = self._places[request], self._requests[-1]
        self._leave(request, place)
        del self._places[request], self._requests[-1]
        self.num_requests -= 1
        self._columns[:, place] = self._columns[:, len(self._requests)]
        self._columns[:, len(self._requests)] = 0
        if last is not request:
            self._requests[place], self._places[last] = last, place
        self.num_paused -= request.paused

    def note_start(self, request: Request, costs: WorkCosts, num_prefill_tokens: int, now: float) -> None:
        """Count a waiting request that is served now; its first `num_prefill_tokens` are computed."""
        placement = request.spec.placement
        room = request.max_total_tokens - request.num_tokens
        work_s = costs.work_s(num_prefill_tokens, min(room, self._expected_output_tokens()))
        self.begun.note_start(work_s, now)
        self._tenants[placement.service_class.name, placement.tenant].begun.note_start(work_s, now)

    def queued(self, costs: WorkCosts) -> tuple[QueuedWork, ...]:
        """The queues of most work, by class and tenant."""
        queues = [
            QueuedWork(name, one.share, tenant, costs.work_s(one.to_compute, one.to_generate), one.begun.rate)
            for (name, tenant), one in list(self._tenants.items())
        ]
        return tuple(heapq.nlargest(MAX_QUEUES, queues, key=lambda queue: queue.work_s))

    def _leave(self, request: Request, place: int) -> None:
        """Its work is its tenant's no more."""
        placement = request.spec.placement
        key = placement.service_class.name, placement.tenant
        tenant = self._tenants[key]
        tenant.num_requests -= 1
        to_compute = int(self._columns[0, place])
        tenant.to_compute -= to_compute
        self.to_compute -= to_compute
        tenant.to_generate -= int(self._columns[3, place])
        if not tenant.num_requests:
            del self._tenants[key]
        if len(self._requests) == 1:
            self.begun.stop()

    def refresh(self, count: int = REFRESHED_PER_STEP) -> None:
        """Measure the next `count` requests again."""
        for _ in range(min(count, len(self._requests))):
            self._next = (self._next + 1) % len(self._requests)
            self._look_at(self._next)

    def outstanding(self, expected_output_tokens: float) -> tuple[int, int]:
        """Tokens to compute of what is known, and to generate (see `expected_rest`)."""
        to_compute, room, done, _ = self._columns[:, : len(self._requests)]
        return int(to_compute.sum()), expected_rest(room, done, expected_output_tokens)

    def _look_at(self, place: int) -> None:
        request = self._requests[place]
        placement = request.spec.placement
        tenant = self._tenants[placement.service_class.name, placement.tenant]
        to_compute = request.num_tokens - self._num_known_tokens(request)
        room, done = request.max_total_tokens - request.num_tokens, request.num_output_tokens
        expected = min(room, max(1, round(self._expected_output_tokens()) - done))
        more = to_compute - int(self._columns[0, place])
        tenant.to_compute += more
        self.to_compute += more
        tenant.to_generate += expected - int(self._columns[3, place])
        self._columns[:, place] = (to_compute, room, done, expected)


def expected_rest(room: IntColumn, done: IntColumn, expected_output_tokens: float) -> int:
    """Output tokens still to come of requests [n] that have `done` and may generate `room` more: up to the usual length
    of an answer, and at least one."""
    usual = round(expected_output_tokens)
    return int(np.minimum(room, np.maximum(1, usual - done)).sum())
