"""Priorities: they order a tenant's requests of one class among each other, and no other tenant notices.

The more urgent of these requests have the earlier ones of the keys that came with all of them. That is two lists in
order, of the requests and of the keys: the rank of a request is the key at its own place. Who comes or goes moves the
others' ranks, but touches none of them.
"""

from __future__ import annotations

from bisect import bisect_left, insort

from app.records.request_state import Ranks, Request

Whose = tuple[str, str]  # tenant and class


class PriorityRanks:
    """The ranks of all requests that count by priority. Those that were cut off do not: they go first anyway."""

    def __init__(self) -> None:
        self._ranks: dict[Whose, _TenantRanks] = {}

    def join(self, request: Request) -> None:
        """From now on it has its rank by its priority."""
        if request.ranks is None and not request.is_returning:
            request.ranks = self._ranks.setdefault(_whose(request), _TenantRanks())
            request.ranks.add(request)

    def leave(self, request: Request) -> None:
        """It has ended, or was cut off: it keeps the rank that it has."""
        if request.ranks is None:
            return
        whose = _whose(request)
        request.key, request.ranks = self._ranks[whose].remove(request), None
        if not self._ranks[whose]:
            del self._ranks[whose]


class _TenantRanks(Ranks):
    """One tenant's, in one class."""

    def __init__(self) -> None:
        self._order: list[tuple[int, int]] = []  # of the requests: priority, and number
        self._keys: list[int] = []

    def __len__(self) -> int:
        return len(self._order)

    def add(self, request: Request) -> None:
        insort(self._order, _place(request))
        insort(self._keys, request.key)

    def remove(self, request: Request) -> int:
        """The rank that it had."""
        index = bisect_left(self._order, _place(request))
        del self._order[index]
        return self._keys.pop(index)

    def rank(self, request: Request) -> int:
        return self._keys[bisect_left(self._order, _place(request))]


def _place(request: Request) -> tuple[int, int]:
    return request.spec.placement.priority, request.number


def _whose(request: Request) -> Whose:
    return request.spec.placement.tenant, request.spec.placement.service_class.name
