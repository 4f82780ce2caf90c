"""Decides whose turn it is: deficit round robin (Shreedhar and Varghese, 1995), by the work that items bring.

In each round a flow (a tenant, or a class of service) may be served a quantum of work, weighted by its share; what it
leaves of that counts in the next round. So an item has a round: that in which its flow has been granted enough for it
and for all that the flow was served before. The lowest round goes first, within one the item that came first. A flow
that was idle begins in the current round, whatever it has left unused.

The engine's queue counts tokens (engine/scheduler), pieces of work that wait for a thread one each (api/http), so that
tenants simply take turns. Where a turn is given back (`settle` with a negative surplus), what was served is what a
tenant holds: who holds least goes first (api/batches).
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from operator import attrgetter, itemgetter
from typing import Generic, Protocol, TypeVar


class Item(Protocol):
    """Something of a tenant's that waits for its turn."""

    @property
    def tenant(self) -> str:
        """The tenant that it belongs to."""
        ...

    @property
    def rank(self) -> int:
        """Its place among the tenant's own: smaller goes first. Unique."""
        ...

    @property
    def cost(self) -> float:
        """The work that it brings."""
        ...


ItemT = TypeVar("ItemT", bound=Item)
Turn = tuple[int, int]  # round and rank of a flow's next item


@dataclass(slots=True, eq=False)
class Flow:
    """Counts what was served of one tenant, or of one class."""

    quantum: float  # of work in a round
    share: float = 1.0
    served: float = 0.0  # work, in the count of rounds
    num_running: int = 0  # items begun, and not ended

    def turn_of(self, item: Item) -> Turn:
        """The turn of an item that is served next of this flow."""
        return math.ceil((self.served + item.cost) / (self.quantum * self.share)), item.rank

    def begin(self, current_round: int) -> None:
        """It has been idle: it is granted the current round's quantum, and no more."""
        self.served = max(self.served, (current_round - 1) * self.quantum * self.share)


@dataclass(slots=True, eq=False)
class _Tenant(Flow, Generic[ItemT]):
    items: list[ItemT] = field(default_factory=list)  # that wait, in the order of their ranks
    turn: Turn = (0, 0)  # under which it stands among the others, if any wait


class TenantTurns(Flow, Generic[ItemT]):
    """The waiting items of one class. Its tenants are forgotten once nothing of theirs waits or runs."""

    def __init__(self, quantum: float, *, are_given_back: bool = False) -> None:
        """are_given_back: who ends an item settles all that it was charged with, so that what was served is what is
        held."""
        super().__init__(quantum)
        self._are_given_back = are_given_back
        self._tenants: dict[str, _Tenant[ItemT]] = {}
        self._turns: list[tuple[Turn, _Tenant[ItemT]]] = []  # of tenants that wait, the next one first
        self._round = 0  # of the last item that was served

    def fair_share(self, num_rows: int) -> float:
        """The part of this class's work that a tenant which waits may count on (max-min: Bertsekas and Gallager, 1992).

        Others that wait take as much; who runs and does not wait takes rows as now, give or take two deviations of a
        Poisson count, as more of it may come. `num_rows`: requests that run at once. Any thread may ask.
        """
        tenants = list(self._tenants.values())
        num_waiting = max(1, sum(bool(tenant.items) for tenant in tenants))
        taken = sum(tenant.num_running for tenant in tenants if not tenant.items)
        left = 1.0 - (taken + 2.0 * math.sqrt(taken)) / num_rows
        return max(1.0 / max(1, len(tenants)), left / num_waiting)

    @property
    def is_waited_for(self) -> bool:
        """True if an item waits. Any thread may ask."""
        return bool(self._turns)

    @property
    def first(self) -> ItemT | None:
        """The next item; None when nothing waits."""
        return self._turns[0][1].items[0] if self._turns else None

    def push(self, item: ItemT) -> None:
        """An item begins to wait."""
        tenant = self._tenants.setdefault(item.tenant, _Tenant(self.quantum))
        if not tenant.items:
            tenant.begin(self._round)
        self._drop_turn(tenant)
        insort(tenant.items, item, key=_rank)
        self._set_turn(tenant)

    def remove(self, item: ItemT) -> None:
        """It waits no longer."""
        name = item.tenant
        tenant = self._tenants[name]
        self._drop_turn(tenant)
        self._take_out(tenant, item)
        self._set_turn(tenant)
        self._forget_idle(name, tenant)

    def serve(self, item: ItemT) -> None:
        """A waiting item is served now: `charge` and `remove` in one."""
        tenant = self._tenants[item.tenant]
        self._advance(tenant, item)
        self._drop_turn(tenant)
        self._take_out(tenant, item)
        self._count(tenant, item.cost, 1)
        self._set_turn(tenant)

    def charge(self, item: ItemT) -> None:
        """It is served now, and does not wait here."""
        tenant = self._tenants.setdefault(item.tenant, _Tenant(self.quantum))
        if not tenant.items:
            tenant.begin(self._round)
        self._advance(tenant, item)
        self._serve(tenant, item.cost, 1)

    def settle(self, item: ItemT, surplus: float) -> None:
        """It has ended, and took `surplus` more work than it was charged with."""
        name = item.tenant
        tenant = self._tenants[name]
        self._serve(tenant, surplus, -1)
        self._forget_idle(name, tenant)

    def in_order(self) -> Iterator[ItemT]:
        """The waiting items as they would be served one after the other. None may come or leave meanwhile."""
        if len(self._turns) == 1:
            return iter(self._turns[0][1].items)
        return in_turn((turn, tenant, iter(tenant.items)) for turn, tenant in self._turns)

    def _advance(self, tenant: _Tenant[ItemT], item: ItemT) -> None:
        if not self._are_given_back:
            self._round = max(self._round, tenant.turn_of(item)[0])

    def _serve(self, tenant: _Tenant[ItemT], work: float, num_running: int) -> None:
        self._drop_turn(tenant)
        self._count(tenant, work, num_running)
        self._set_turn(tenant)

    def _count(self, tenant: _Tenant[ItemT], work: float, num_running: int) -> None:
        for flow in (self, tenant):
            flow.served += work
            flow.num_running += num_running

    def _take_out(self, tenant: _Tenant[ItemT], item: ItemT) -> None:
        items = tenant.items
        index = 0 if items[0] is item else bisect_left(items, item.rank, key=_rank)
        assert items[index] is item
        del items[index]

    def _set_turn(self, tenant: _Tenant[ItemT]) -> None:
        if tenant.items:
            tenant.turn = tenant.turn_of(tenant.items[0])
            insort(self._turns, (tenant.turn, tenant), key=_turn)

    def _drop_turn(self, tenant: _Tenant[ItemT]) -> None:
        if tenant.items:
            index = bisect_left(self._turns, tenant.turn, key=_turn)
            assert self._turns[index][1] is tenant
            del self._turns[index]

    def _forget_idle(self, name: str, tenant: _Tenant[ItemT]) -> None:
        if not tenant.items and not tenant.num_running:
            del self._tenants[name]


def in_turn(flows: Iterable[tuple[Turn, Flow, Iterator[ItemT]]]) -> Iterator[ItemT]:
    """The items of several flows in the order of their turns. `flows` come in that of their first items', and are
    read no further than need be."""
    flows = iter(flows)
    fresh = next(flows, None)
    begun: list[tuple[Turn, _Walk[ItemT]]] = []
    while fresh is not None or begun:
        if fresh is not None and (not begun or fresh[0] < begun[0][0]):
            walk, fresh = _Walk(fresh[1], fresh[2]), next(flows, None)
        else:
            walk = heapq.heappop(begun)[1]
        yield walk.take()
        if (turn := walk.turn()) is not None:
            heapq.heappush(begun, (turn, walk))


class _Walk(Generic[ItemT]):
    """A flow's items one after the other, each with the turn that it has once those before it were served."""

    def __init__(self, flow: Flow, items: Iterator[ItemT]) -> None:
        self._flow = Flow(flow.quantum, flow.share, flow.served)  # as it is now
        self._items = items
        self._next = next(items, None)

    def turn(self) -> Turn | None:
        return None if self._next is None else self._flow.turn_of(self._next)

    def take(self) -> ItemT:
        taken = self._next
        assert taken is not None
        self._flow.served += taken.cost
        self._next = next(self._items, None)
        return taken


_rank = attrgetter("rank")
_turn = itemgetter(0)
