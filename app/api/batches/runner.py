"""The batches of one ingress replica. It works on each under a lease; a batch whose replica has died is taken over by
whoever sees it first."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any

from app.api.batches.batch import RUNNING, Batch
from app.api.batches.file_store import EXPIRES_S, FileStore
from app.api.batches.run import BatchRun, Tools
from app.api.store.entries import NEW, Birth, Lease, Seen, StoreConflictError, Stored
from app.api.store.leased_entry import MAX_ATTEMPTS, LeasedEntry
from app.api.store.tenant_store import TenantStore
from app.errors import InvalidRequestError, MantaError, OverloadedError

LABEL = "batches"  # of OpenAI's

logger = logging.getLogger("manta.api")


class BatchNotFoundError(InvalidRequestError):
    """No batch is kept under this id for this tenant."""

    status = 404
    code = "batch_not_found"


@dataclass(slots=True)
class _Entry:
    """A batch that this replica works on, and its place in the store."""

    run: BatchRun
    leased: LeasedEntry
    task: asyncio.Task[None] | None = None


async def _always() -> bool:
    return True


class BatchRunner:
    """Begins batches, cancels them, and takes over those that nobody works on any more."""

    def __init__(self, tools: Tools, batches: TenantStore, max_tenant: int) -> None:
        self._tools = replace(tools, files=FileStore(tools.files.entries.patient()))
        self._batches = batches
        self._max_tenant = max_tenant
        self._entries: dict[tuple[str, str], _Entry] = {}
        self._watch: asyncio.Task[None] | None = None

    @property
    def held_bytes(self) -> int:
        """Memory of the lines that are read or under way."""
        return self._tools.room.total

    def start(self, has_store: Callable[[], Awaitable[bool]] = _always) -> None:
        """Look for batches without a worker, from now on; only while there is a store."""
        if self._watch is None or self._watch.done():
            self._watch = asyncio.create_task(self._look(has_store))

    async def begin(self, tenant: str, batch: Batch, label: str = LABEL) -> None:
        """Keep a batch and begin with it. OverloadedError when the tenant has as many under way as it may."""
        self.start()
        lease = Lease(self._tools.owner, self._tools.lease_s)
        born = Birth(label=label, max_owned=self._max_tenant)
        version = await self._batches.put(tenant, batch.id, batch.dump(), seen=NEW, lease=lease, born=born)
        self._work(tenant, batch, version)

    async def find(self, tenant: str, batch_id: str) -> tuple[Batch, Stored]:
        """A batch as it was last stored; BatchNotFoundError where there is none."""
        stored = await self._batches.get(tenant, batch_id)
        if stored is None:
            raise BatchNotFoundError(f"there is no batch {batch_id[:256]!r}", param="batch_id")
        return Batch.load(stored.header), stored

    async def cancel(self, tenant: str, batch_id: str) -> Batch:
        """End a batch; its worker aborts what is under way, and what is done stays."""
        for _ in range(MAX_ATTEMPTS):
            batch, stored = await self.find(tenant, batch_id)
            if batch.status in ("cancelling", "cancelled"):
                return batch
            if batch.status not in ("validating", "in_progress"):
                raise InvalidRequestError(f"the batch is {batch.status}", param="batch_id")
            batch.becomes("cancelling")
            lease = Lease(stored.owner, self._tools.lease_s)
            try:
                await self._batches.put(tenant, batch_id, batch.dump(), seen=Seen(stored.version), lease=lease)
            except StoreConflictError:
                continue
            entry = self._entries.get((tenant, batch_id))
            if entry is not None:
                with contextlib.suppress(StoreConflictError):  # it has ended meanwhile
                    await self._save(entry)
            return batch
        raise OverloadedError("the batch changes too fast; try again")

    def _work(self, tenant: str, batch: Batch, version: int) -> None:
        async def save() -> None:
            await self._save(entry)

        tools = self._tools
        leased = LeasedEntry(self._batches.patient(), tenant, batch.id, Lease(tools.owner, tools.lease_s), version)
        entry = _Entry(BatchRun(tools, tenant, batch, save), leased)
        self._entries[tenant, batch.id] = entry
        entry.task = asyncio.create_task(self._run(tenant, entry))

    async def _run(self, tenant: str, entry: _Entry) -> None:
        batch = entry.run.batch

        def lost() -> None:
            if entry.task is not None:
                entry.task.cancel()

        try:
            with entry.leased.beating(lambda: self._save(entry), lost):
                if batch.num_takeovers:
                    await self._save(entry)  # before anything of it can end this server too
                await entry.run.run()
            await self._save(entry, is_last=True)
            await entry.run.forget_empty()
        except StoreConflictError:
            logger.info("the batch %s is somebody else's by now", batch.id)
        except MantaError as error:
            logger.warning("the batch %s is left to who takes it over: %s", batch.id, error.message)
        finally:
            self._entries.pop((tenant, batch.id), None)

    async def _save(self, entry: _Entry, is_last: bool = False) -> None:
        """Write the batch. Where another replica has cancelled it meanwhile, it is cancelled here too."""
        run = entry.run

        def when_changed(stored: Stored) -> None:
            if Batch.load(stored.header).status == "cancelling" and run.batch.status in RUNNING:
                run.batch.becomes("cancelling")
                run.stop()

        expires: dict[str, Any] = {"expires_s": float(EXPIRES_S)} if is_last else {}
        await entry.leased.write(run.batch.dump, is_last=is_last, when_changed=when_changed, **expires)

    async def _look(self, has_store: Callable[[], Awaitable[bool]]) -> None:
        while True:
            try:
                while await has_store() and (
                    found := await self._batches.claim(self._tools.owner, self._tools.lease_s)
                ):
                    self._adopt(*found)
            except MantaError as error:
                logger.warning("the store of batches: %s", error.message)
            except Exception:  # without this watch nobody goes on with what another replica has left
                logger.exception("the watch for batches that nobody works on")
            await asyncio.sleep(self._tools.lease_s)

    def _adopt(self, tenant: str, stored: Stored) -> None:
        own = self._entries.get((tenant, stored.key))
        if own is not None:  # only its heartbeat was late
            own.leased.adopt(stored.version, stored.num_chunks)
            return
        logger.info("the batch %s is taken over", stored.key)
        batch = Batch.load(stored.header)
        batch.note_takeover()
        self._work(tenant, batch, stored.version)
