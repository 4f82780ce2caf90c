"""Decides who may send the next request of a batch: a bound on all, shared equally by the tenants that have batches."""

from __future__ import annotations

import asyncio
from collections import Counter


class Turns:
    """At most `most` at a time; a tenant has at most its share of them while others wait for theirs."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._running: Counter[str] = Counter()
        self._waiting: Counter[str] = Counter()
        self._changed = asyncio.Condition()

    async def acquire(self, tenant: str) -> None:
        """Wait for a turn."""
        self._waiting[tenant] += 1
        try:
            async with self._changed:
                await self._changed.wait_for(lambda: self._may(tenant))
                self._running[tenant] += 1
        finally:
            self._waiting[tenant] -= 1

    async def release(self, tenant: str) -> None:
        """Release a turn."""
        async with self._changed:
            self._running[tenant] -= 1
            self._changed.notify_all()

    def _may(self, tenant: str) -> bool:
        if self._running.total() >= self._most:
            return False
        tenants = len(+self._running | +self._waiting | Counter({tenant: 1}))
        return self._running[tenant] < max(1, -(-self._most // tenants))
