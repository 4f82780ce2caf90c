"""Memory for the lines of batches that are read or under way in an ingress replica: whoever finds no room waits."""

from __future__ import annotations

import asyncio
from collections import Counter


class LineRoom:
    """At most `most` bytes in all, half of that of one tenant; one piece alone always finds room."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._held: Counter[str] = Counter()  # bytes of each tenant
        self._changed = asyncio.Event()

    @property
    def total(self) -> int:
        """Bytes of all tenants."""
        return self._held.total()

    async def acquire(self, tenant: str, num_bytes: int) -> None:
        """Wait until so many bytes find room, and hold them."""
        while not self._may(tenant, num_bytes):
            await self._changed.wait()
        self.add(tenant, num_bytes)

    def add(self, tenant: str, num_bytes: int) -> None:
        """Hold bytes that are there already."""
        self._held[tenant] += num_bytes

    def release(self, tenant: str, num_bytes: int) -> None:
        """Give bytes back."""
        self._held[tenant] -= num_bytes
        if not self._held[tenant]:
            del self._held[tenant]
        self._changed.set()
        self._changed = asyncio.Event()

    def _may(self, tenant: str, num_bytes: int) -> bool:
        own, total = self._held[tenant], self._held.total()
        fits_own = not own or own + num_bytes <= self._most // 2
        return fits_own and (not total or total + num_bytes <= self._most)
