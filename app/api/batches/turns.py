"""Decides who may send the next request of a batch: a bound on all, shared equally by the tenants that have batches."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from itertools import count

from app.turns import TenantTurns


@dataclass(slots=True, eq=False)
class _Turn:
    tenant: str
    rank: int = 0
    cost: float = 1.0
    may_begin: asyncio.Event = field(default_factory=asyncio.Event)


class Turns:
    """At most `most` at a time; one that comes free is for the tenant that has fewest of those who wait."""

    def __init__(self, most: int) -> None:
        self._num_free = most
        self._turns = TenantTurns[_Turn](1.0, are_given_back=True)
        self._ranks = count()

    async def acquire(self, tenant: str) -> None:
        """Wait for a turn."""
        turn = _Turn(tenant, next(self._ranks))
        self._turns.push(turn)
        self._grant()
        try:
            await turn.may_begin.wait()
        except asyncio.CancelledError:
            if turn.may_begin.is_set():
                self.release(tenant)
            else:
                self._turns.remove(turn)
            raise

    def release(self, tenant: str) -> None:
        """Release a turn."""
        self._turns.settle(_Turn(tenant), -1.0)
        self._num_free += 1
        self._grant()

    def _grant(self) -> None:
        while self._num_free and (turn := self._turns.first) is not None:
            self._turns.serve(turn)
            self._num_free -= 1
            turn.may_begin.set()
