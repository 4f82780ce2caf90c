"""Background responses: they go on without the client, and every ingress replica can show, stream and cancel them.

The replica that took a response works on it under a lease, which its heartbeats prolong. What the model says goes to
the store as events, and with each heartbeat as the response so far. Whoever ends a response first, wins: a cancel or a
deletion elsewhere takes the entry away from the worker, which then stops.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from app.api.errors import as_manta_error
from app.api.events import EventStream
from app.api.openai.responses_answer import ResponseAnswer, ResponseEvents
from app.api.response_store import ENDED, MAX_ATTEMPTS, ResponseStore
from app.api.store.entries import StorageFullError, StoreConflictError, Stored
from app.config import IngressConfig
from app.errors import InvalidRequestError, MantaError, OverloadedError

MAX_EVENT_BYTES = 16 << 20  # kept of one response; beyond, only its end is
POLL_S = 0.25  # how often a response that another replica works on is looked at

logger = logging.getLogger("manta.api")


@dataclass(slots=True)
class Job:
    """One response under way in this process."""

    tenant: str
    answer: ResponseAnswer
    stream: EventStream
    events: ResponseEvents
    version: int = 0
    num_event_bytes: int = 0
    has_begun: bool = False
    is_cut: bool = False  # its events were too many: only the last one follows
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    writing: asyncio.Lock = field(default_factory=asyncio.Lock)
    task: asyncio.Task[None] | None = None

    def pushed(self) -> None:
        """Wake who follows the stream."""
        self.changed.set()
        self.changed = asyncio.Event()


class BackgroundResponses:
    """The background responses of one ingress replica."""

    def __init__(self, store: ResponseStore, ingress: IngressConfig) -> None:
        self._store = store
        self._ingress = ingress
        self._owner = uuid.uuid4().hex
        self._jobs: dict[tuple[str, str], Job] = {}

    def check_room(self, tenant: str) -> None:
        """OverloadedError when this replica has as many under way as it may."""
        own = sum(owner == tenant for owner, _ in self._jobs)
        most, most_own = self._ingress.max_background_responses, self._ingress.max_tenant_background_responses
        if len(self._jobs) >= most or own >= most_own:
            raise OverloadedError(f"{own} background responses of yours are under way, {len(self._jobs)} in all")

    async def start(self, tenant: str, answer: ResponseAnswer, stream: EventStream, asked: bytes) -> dict[str, Any]:
        """Keep a response as queued and begin with it; the response as it is now. `asked` is its input as JSON."""
        self.check_room(tenant)
        job = Job(tenant, answer, stream, ResponseEvents(answer, _nothing))
        self._jobs[tenant, answer.id] = job
        response = answer.response("queued")
        try:
            job.version = await self._store.keep(
                tenant, response, asked, _split(job.events.queued()), version=0, **self._lease()
            )
        except BaseException:
            del self._jobs[tenant, answer.id]
            raise
        job.task = asyncio.create_task(self._run(job))
        return response

    async def cancel(self, tenant: str, response_id: str) -> Stored:
        """End a response as cancelled, unless it has ended otherwise."""
        for _ in range(MAX_ATTEMPTS):
            stored = await self._store.find(tenant, response_id)
            response = json.loads(stored.header)
            if not response["background"]:
                raise InvalidRequestError("only a background response can be cancelled", param="response_id")
            if response["status"] in ENDED:
                break
            job = self._jobs.get((tenant, response_id))
            if job is not None:
                response = job.answer.response("in_progress")
            is_ours = await self._store.end(tenant, stored, response | {"status": "cancelled"})
            if is_ours and job is not None and job.task is not None:
                job.task.cancel()
                job.pushed()
        return await self._store.find(tenant, response_id)

    async def follow(self, tenant: str, response_id: str, after: int) -> AsyncIterator[bytes]:
        """The events of a response after number `after`, while it is made and to its end; b"" when none came for a
        while."""
        position, silent_s = after + 2, 0.0
        while True:
            job = self._jobs.get((tenant, response_id))
            changed = job.changed if job is not None else asyncio.Event()
            stored = await self._store.find(tenant, response_id)
            chunks = await self._store.entries.read(tenant, response_id, position)
            if chunks is None:
                return
            if chunks:
                position, silent_s = position + len(chunks), 0.0
                yield b"".join(chunks)
            elif json.loads(stored.header)["status"] in ENDED:
                return
            else:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(changed.wait(), POLL_S)
                silent_s += POLL_S
                if silent_s >= self._ingress.sse_keep_alive_s:
                    silent_s = 0.0
                    yield b""

    def _lease(self) -> dict[str, Any]:
        return {"owner": self._owner, "lease_s": self._ingress.lease_s}

    async def _run(self, job: Job) -> None:
        beat = asyncio.create_task(self._beat(job))
        try:
            try:
                await self._answer(job)
                await self._write(job, job.answer.response(), _split(job.events.end()))
            except (StoreConflictError, asyncio.CancelledError):
                return  # somebody else has ended or deleted it
            except Exception as error:
                described = as_manta_error(error)
                await self._write(job, job.answer.response("failed", described), _split(job.events.error(described)))
        except MantaError as error:
            logger.warning("the response %s is not kept: %s", job.answer.id, error.message)
        finally:
            beat.cancel()
            del self._jobs[job.tenant, job.answer.id]
            job.pushed()

    async def _answer(self, job: Job) -> None:
        async with job.stream as stream:
            while batch := await stream.next_batch():
                begun, job.has_begun = job.has_begun, True
                text = ("" if begun else job.events.start()) + "".join(map(job.events.event, batch))
                await self._push(job, _split(text))

    async def _push(self, job: Job, events: list[bytes]) -> None:
        job.num_event_bytes += sum(map(len, events))
        job.is_cut = job.is_cut or job.num_event_bytes > MAX_EVENT_BYTES
        if not events or job.is_cut:
            return
        try:
            await self._store.entries.append(job.tenant, job.answer.id, events, self._owner)
        except StorageFullError:
            job.is_cut = True
        job.pushed()

    async def _beat(self, job: Job) -> None:
        """Prolong the lease and keep what was said so far; stop the work on an entry that is no longer ours."""
        while True:
            await asyncio.sleep(self._ingress.lease_s / 4)
            try:
                if job.has_begun:
                    await self._write(job, job.answer.response("in_progress"), [], **self._lease())
                else:
                    await self._store.entries.renew(job.tenant, job.answer.id, self._owner, self._ingress.lease_s)
            except StoreConflictError:
                if job.task is not None:
                    job.task.cancel()
                return
            except MantaError as error:
                logger.warning("the store of responses: %s", error.message)

    async def _write(self, job: Job, response: dict[str, Any], events: list[bytes], **options: Any) -> None:
        async with job.writing:
            header = json.dumps(response).encode()
            job.version = await self._store.entries.put(
                job.tenant, job.answer.id, header, append=events, version=job.version, **options
            )


def _split(text: str) -> list[bytes]:
    """Events one by one; a blank line ends each, and JSON has none within."""
    return [f"{event}\n\n".encode() for event in text.split("\n\n") if event]


async def _nothing() -> None:
    """A background response is kept all along."""
