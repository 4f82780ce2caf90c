"""Decides whose turn it is: deficit round robin (Shreedhar and Varghese, 1995), by the work that requests bring.

In each round a flow (a tenant, or a class of service) may be served a quantum of work, weighted by its share; what it
leaves of that counts in the next round. So a request has a round: that in which its flow has been granted enough for
it and for all that the flow was served before. The lowest round goes first, within one the request that came first. A
flow that was idle begins in the current round, whatever it has left unused. Work is counted in tokens: prompt tokens
that are not cached, and output, as expected at first and as it was in the end.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from operator import attrgetter, itemgetter

from app.records.request_state import Request

QUANTUM_TOKENS = 1024.0
Turn = tuple[int, int]  # round and rank of a flow's next request; ranks are unique


@dataclass(slots=True, eq=False)
class Flow:
    """Counts what was served of one tenant, or of one class."""

    share: float = 1.0
    served: float = 0.0  # tokens, in the count of rounds
    num_running: int = 0  # requests begun, and not ended

    def turn_of(self, request: Request, ahead: float = 0.0) -> Turn:
        """The turn of a request, when `ahead` further tokens of this flow are served before it."""
        return math.ceil((self.served + ahead + request.cost) / (QUANTUM_TOKENS * self.share)), request.rank

    def begin(self, current_round: int) -> None:
        """It has been idle: it is granted the current round's quantum, and no more."""
        self.served = max(self.served, (current_round - 1) * QUANTUM_TOKENS * self.share)


@dataclass(slots=True, eq=False)
class _Tenant(Flow):
    requests: list[Request] = field(default_factory=list)  # that wait, in the order of their ranks
    turn: Turn = (0, 0)  # under which it stands among the others, if any wait


class TenantTurns(Flow):
    """The waiting requests of one class. Its tenants are forgotten once nothing of theirs waits or runs."""

    def __init__(self) -> None:
        super().__init__()
        self._tenants: dict[str, _Tenant] = {}
        self._turns: list[tuple[Turn, _Tenant]] = []  # of tenants that wait, the next one first
        self._round = 0  # of the last request that was served

    def fair_share(self, num_rows: int) -> float:
        """The part of this class's work that a tenant which waits may count on (max-min: Bertsekas and Gallager, 1992).

        Others that wait take as much; who runs and does not wait takes rows as now, give or take two deviations of a
        Poisson count, as more of it may come. `num_rows`: requests that run at once. Any thread may ask.
        """
        tenants = list(self._tenants.values())
        num_waiting = max(1, sum(bool(tenant.requests) for tenant in tenants))
        taken = sum(tenant.num_running for tenant in tenants if not tenant.requests)
        left = 1.0 - (taken + 2.0 * math.sqrt(taken)) / num_rows
        return max(1.0 / max(1, len(tenants)), left / num_waiting)

    @property
    def is_waited_for(self) -> bool:
        """True if a request waits. Any thread may ask."""
        return bool(self._turns)

    @property
    def first(self) -> Request | None:
        """The next request; None when nothing waits."""
        return self._turns[0][1].requests[0] if self._turns else None

    def push(self, request: Request) -> None:
        """A request begins to wait."""
        tenant = self._tenants.setdefault(request.spec.placement.tenant, _Tenant())
        if not tenant.requests:
            tenant.begin(self._round)
        self._drop_turn(tenant)
        insort(tenant.requests, request, key=_rank)
        self._set_turn(tenant)

    def remove(self, request: Request) -> None:
        """It waits no longer."""
        name = request.spec.placement.tenant
        tenant = self._tenants[name]
        self._drop_turn(tenant)
        self._take_out(tenant, request)
        self._set_turn(tenant)
        self._forget_idle(name, tenant)

    def serve(self, request: Request) -> None:
        """A waiting request is served now: `charge` and `remove` in one."""
        tenant = self._tenants[request.spec.placement.tenant]
        self._round = max(self._round, tenant.turn_of(request)[0])
        self._drop_turn(tenant)
        self._take_out(tenant, request)
        self._count(tenant, request.cost, 1)
        self._set_turn(tenant)

    def charge(self, request: Request) -> None:
        """It is served now, and does not wait here."""
        tenant = self._tenants.setdefault(request.spec.placement.tenant, _Tenant())
        if not tenant.requests:
            tenant.begin(self._round)
        self._round = max(self._round, tenant.turn_of(request)[0])
        self._serve(tenant, request.cost, 1)

    def settle(self, request: Request, surplus: float) -> None:
        """It has ended, and took `surplus` tokens more than it was charged with."""
        name = request.spec.placement.tenant
        tenant = self._tenants[name]
        self._serve(tenant, surplus, -1)
        self._forget_idle(name, tenant)

    def in_order(self) -> Iterator[Request]:
        """The waiting requests as they would be served one after the other. None may come or leave meanwhile."""
        if len(self._turns) == 1:
            return iter(self._turns[0][1].requests)
        return in_turn((turn, tenant, iter(tenant.requests)) for turn, tenant in self._turns)

    def _serve(self, tenant: _Tenant, tokens: float, num_running: int) -> None:
        self._drop_turn(tenant)
        self._count(tenant, tokens, num_running)
        self._set_turn(tenant)

    def _count(self, tenant: _Tenant, tokens: float, num_running: int) -> None:
        for flow in (self, tenant):
            flow.served += tokens
            flow.num_running += num_running

    def _take_out(self, tenant: _Tenant, request: Request) -> None:
        requests = tenant.requests
        index = 0 if requests[0] is request else bisect_left(requests, request.rank, key=_rank)
        assert requests[index] is request
        del requests[index]

    def _set_turn(self, tenant: _Tenant) -> None:
        if tenant.requests:
            tenant.turn = tenant.turn_of(tenant.requests[0])
            insort(self._turns, (tenant.turn, tenant), key=_turn)

    def _drop_turn(self, tenant: _Tenant) -> None:
        if tenant.requests:
            index = bisect_left(self._turns, tenant.turn, key=_turn)
            assert self._turns[index][1] is tenant
            del self._turns[index]

    def _forget_idle(self, name: str, tenant: _Tenant) -> None:
        if not tenant.requests and not tenant.num_running:
            del self._tenants[name]


def in_turn(flows: Iterable[tuple[Turn, Flow, Iterator[Request]]]) -> Iterator[Request]:
    """The requests of several flows in the order of their turns. `flows` come in that of their first requests', and are
    read no further than need be."""
    flows = iter(flows)
    fresh = next(flows, None)
    begun: list[tuple[Turn, _Walk]] = []
    while fresh is not None or begun:
        if fresh is not None and (not begun or fresh[0] < begun[0][0]):
            walk, fresh = _Walk(fresh[1], fresh[2]), next(flows, None)
        else:
            walk = heapq.heappop(begun)[1]
        yield walk.take()
        if (turn := walk.turn()) is not None:
            heapq.heappush(begun, (turn, walk))


class _Walk:
    """A flow's requests one after the other, each with the turn that it has once those before it were served."""

    def __init__(self, flow: Flow, requests: Iterator[Request]) -> None:
        self._flow = Flow(flow.share, flow.served)  # as it is now
        self._requests = requests
        self._next = next(requests, None)

    def turn(self) -> Turn | None:
        return None if self._next is None else self._flow.turn_of(self._next)

    def take(self) -> Request:
        taken = self._next
        assert taken is not None
        self._flow.served += taken.cost
        self._next = next(self._requests, None)
        return taken


_rank = attrgetter("rank")
_turn = itemgetter(0)
