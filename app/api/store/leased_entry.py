"""Work on a stored entry under a lease: its worker writes and appends, whatever becomes of single calls.

Whatever outlives its request is such work: kept answers, background responses, batches and their files of results. A
beat prolongs the lease while it goes on; where that has run out, somebody else may take the entry.

A call whose answer is lost may have been done. So each has a form that changes nothing the second time, for the
store to be asked again (see `TenantStore.patient`), and where another has changed the entry, it is looked up.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from app.api.store.entries import NO_LEASE, Lease, Seen, StoreConflictError, Stored
from app.api.store.tenant_store import TenantStore
from app.errors import MantaError

MAX_ATTEMPTS = 16  # at a change that others overtake
BEATS = 4  # in the length of a lease

logger = logging.getLogger("manta.api")


class LeasedEntry:
    """An entry of a patient store that its owner works on. StoreConflictError once it is gone or somebody else's."""

    def __init__(
        self,
        store: TenantStore,
        tenant: str,
        key: str,
        lease: Lease,
        version: int = 0,
        num_chunks: int = 0,
    ) -> None:
        self._store = store
        self._place = tenant, key
        self._lease = lease
        self._version = version
        self._is_over = False
        self.num_chunks = num_chunks
        self.lock = asyncio.Lock()  # held while it changes

    async def write(
        self,
        header: Callable[[], bytes],
        append: Sequence[bytes] = (),
        *,
        is_last: bool = False,
        when_changed: Callable[[Stored], None] = lambda stored: None,
        **options: Any,
    ) -> None:
        """Replace the header and prolong the lease, or give it up with the last write. Where another has changed the
        entry, but left it to its owner, `when_changed` is told, and `header` asked again."""
        lease = NO_LEASE if is_last else self._lease
        async with self.lock:
            if self._is_over:
                raise StoreConflictError(f"{self._place[1]} has had its last write")
            for _ in range(MAX_ATTEMPTS):
                fields = {"append": append, "seen": Seen(self._version), "lease": lease, **options}
                try:
                    self._version = await self._store.put(*self._place, header(), **fields)
                except StoreConflictError as error:
                    when_changed(await self._look_again(error))
                else:
                    self.num_chunks += len(append)
                    self._is_over = is_last
                    return
        raise StoreConflictError(f"{self._place[1]} changes too fast")

    async def append(self, chunks: Sequence[bytes]) -> None:
        """Add chunks. StorageFullError leaves the entry as it is."""
        async with self.lock:
            self.num_chunks = await self._store.append(*self._place, chunks, self._lease.owner, self.num_chunks)

    async def renew(self) -> None:
        """Prolong the lease."""
        await self._store.renew(*self._place, self._lease.owner, self._lease.seconds)

    @contextmanager
    def beating(self, save: Callable[[], Awaitable[None]], lost: Callable[[], None]) -> Iterator[None]:
        """Within the block `save` prolongs the lease again and again, by `write` or `renew`. `lost` is called once the
        entry is gone or somebody else's; a store that does not answer is asked again."""
        beat = asyncio.create_task(self._beat(save, lost))
        try:
            yield
        finally:
            beat.cancel()

    async def _beat(self, save: Callable[[], Awaitable[None]], lost: Callable[[], None]) -> None:
        while True:
            await asyncio.sleep(self._lease.seconds / BEATS)
            try:
                await save()
            except StoreConflictError:
                lost()
                return
            except MantaError as error:
                logger.warning("the store, for %s: %s", self._place[1], error.message)

    def adopt(self, version: int, num_chunks: int) -> None:
        """Go on from what the store has."""
        self._version, self.num_chunks = version, num_chunks

    async def _look_again(self, error: StoreConflictError) -> Stored:
        """The entry as it is now; `error` where it is not ours."""
        stored = await self._store.get(*self._place)
        if stored is None or stored.owner != self._lease.owner:
            raise error
        self.adopt(stored.version, stored.num_chunks)
        return stored
