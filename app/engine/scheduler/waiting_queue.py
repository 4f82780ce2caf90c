"""Requests without a row, in the order of service.

Those that had a row, here or on another replica, go first: their clients wait for the next token. Then the classes of
service take turns, weighted by their shares, and within a class its tenants; see app/turns.py. A tenant's own
requests come in the order of their ranks. With one class and one tenant that is first come, first served. Those that
are held for a slow client have no place meanwhile.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from itertools import islice
from operator import attrgetter

from app.engine.scheduler.queue_load import QueueLoad, WorkCosts
from app.records.request_state import Request
from app.records.stats import QueuedWork
from app.turns import Flow, TenantTurns, Turn, in_turn

_rank = attrgetter("rank")
QUANTUM_TOKENS = 1024.0  # of work: prompt tokens that are not cached, and output, as expected and as it was in the end


class WaitingQueue:
    """Iterates in the order of service, while none comes or leaves. Requests have unique ranks."""

    def __init__(
        self,
        num_known_tokens: Callable[[Request], int] = lambda request: 0,
        expected_output_tokens: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """`num_known_tokens`: see QueueLoad. `expected_output_tokens()`: the usual length of an answer."""
        self._returning: list[Request] = []
        self._classes: dict[str, TenantTurns[Request]] = {}
        self._round = 0  # of the last request that was served, in the classes' turns
        self._num_known_tokens = num_known_tokens
        self._expected_output_tokens = expected_output_tokens
        self.load = QueueLoad(num_known_tokens, expected_output_tokens)

    def __len__(self) -> int:
        return self.load.num_requests

    def __iter__(self) -> Iterator[Request]:
        if self._returning:
            yield from self._returning
        waiting = [(turns, first) for turns in self._classes.values() if (first := turns.first) is not None]
        if len(waiting) == 1:
            yield from waiting[0][0].in_order()
            return
        flows: list[tuple[Turn, Flow, Iterator[Request]]] = [
            (turns.turn_of(first), turns, turns.in_order()) for turns, first in waiting
        ]
        yield from in_turn(sorted(flows, key=lambda flow: flow[0]))

    def first(self, count: int) -> list[Request]:
        """The next requests; work that does not grow with how many wait behind them."""
        return list(islice(self, count))

    def push(self, request: Request, now: float = 0.0) -> None:
        """Add a new or preempted request at its place."""
        if not request.paused:
            self._enter(request)
        self.load.add(request, now)

    def remove(self, request: Request) -> None:
        """Take out one request, from anywhere."""
        if not request.paused:
            self._leave(request)
        self.load.remove(request)

    def set_paused(self, request: Request, paused: bool) -> None:
        """Hold one that waits, or let it find its place again."""
        if paused:
            self._leave(request)
        request.paused = paused
        if not paused:
            self._enter(request)
        self.load.num_paused += 1 if paused else -1

    def _enter(self, request: Request) -> None:
        if request.is_returning:
            insort(self._returning, request, key=_rank)
        else:
            request.cost = self._cost(request)
            turns = self._turns(request)
            turns.share = request.spec.placement.service_class.share
            if turns.first is None:
                turns.begin(self._round)
            turns.push(request)

    def _leave(self, request: Request) -> None:
        if request.is_returning:
            index = bisect_left(self._returning, request.rank, key=_rank)
            assert self._returning[index] is request
            del self._returning[index]
        else:
            self._turns(request).remove(request)

    def take(self, request: Request) -> None:
        """Take out a request that is served now."""
        if request.is_charged:
            self.remove(request)
            return
        is_returning = request.is_returning
        if is_returning:
            request.cost = self._cost(request)
        request.is_charged = True
        turns = self._turns(request)
        self._round = max(self._round, turns.turn_of(request)[0])
        if is_returning:
            turns.charge(request)
            self.remove(request)
        else:
            turns.serve(request)
            self.load.remove(request)

    def settle(self, request: Request) -> None:
        """A request has ended: what it took is no estimate any more."""
        if request.is_charged:
            num_prefilled = request.num_prompt_tokens + request.num_resumed_tokens - request.num_cached_tokens
            num_generated = request.num_output_tokens - request.num_resumed_tokens
            self._turns(request).settle(request, num_prefilled + num_generated - request.cost)

    def queued(self, costs: WorkCosts, num_rows: int) -> tuple[QueuedWork, ...]:
        """The queues of most work, by class and tenant; where a rate is not measured yet, what the tenant may count on
        while others go on coming. `num_rows`: requests that run at once. Any thread may ask."""
        begun = min(self.load.begun.rate or 1.0, 1.0)
        classes = {name: turns for name, turns in list(self._classes.items()) if turns.is_waited_for}
        all_shares = sum(turns.share for turns in classes.values())
        rates = {name: begun * turns.share / all_shares * turns.fair_share(num_rows) for name, turns in classes.items()}
        return tuple(
            one if one.rate else one._replace(rate=rates.get(one.service_class, 0.0)) for one in self.load.queued(costs)
        )

    def _turns(self, request: Request) -> TenantTurns[Request]:
        name = request.spec.placement.service_class.name
        turns = self._classes.get(name)
        if turns is None:
            turns = self._classes[name] = TenantTurns(QUANTUM_TOKENS)
        return turns

    def _cost(self, request: Request) -> float:
        """Tokens to compute and to generate, at least one."""
        room = request.max_total_tokens - request.num_tokens
        to_compute = request.num_tokens - self._num_known_tokens(request)
        return max(1.0, to_compute + min(room, self._expected_output_tokens()))
