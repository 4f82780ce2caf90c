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
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

from app.api.generation.events import EventStream
from app.api.http.errors import as_manta_error
from app.api.http.held_bytes import Holding
from app.api.http.json_response import utf8
from app.api.http.work_pool import PARSE_S_PER_BYTE, RequestWork
from app.api.openai.response_store import ENDED, ResponseStore, not_found
from app.api.openai.responses_answer import ResponseAnswer, ResponseEvents, event_text
from app.api.store.entries import NEW, Lease, StorageFullError, StoreConflictError, Stored
from app.api.store.leased_entry import MAX_ATTEMPTS, LeasedEntry
from app.config.ingress import IngressConfig
from app.errors import InvalidRequestError, MantaError, OverloadedError

MAX_EVENT_BYTES = 16 << 20  # kept of one response; beyond, only its end is
POLL_S = 0.25  # between looks at a response of another replica, and calls to keep events that nobody here follows

logger = logging.getLogger("manta.api")


@dataclass(slots=True)
class Job:
    """One response under way in this process."""

    tenant: str
    answer: ResponseAnswer
    stream: EventStream
    events: ResponseEvents
    entry: LeasedEntry
    work: RequestWork
    num_asked_bytes: int
    num_event_bytes: int = 0
    has_begun: bool = False
    is_cut: bool = False  # its events were too many: only the last one follows
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    is_followed: asyncio.Event = field(default_factory=asyncio.Event)  # somebody waits for what comes, or did
    task: asyncio.Task[None] | None = None

    @property
    def cost_s(self) -> float:
        """Estimate of the time that writing the response as JSON takes: its events say most of it twice."""
        return (self.num_asked_bytes + self.num_event_bytes) * PARSE_S_PER_BYTE

    def wake_followers(self) -> None:
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

    async def start(
        self,
        tenant: str,
        work: RequestWork,
        answer: ResponseAnswer,
        stream: EventStream,
        asked: bytes,
        holding: Holding,
    ) -> dict[str, Any]:
        """Keep a response as queued and begin with it; the response as it is now. `asked` is its input as JSON, and
        `holding`, what the request holds, counts until its end."""
        self.check_room(tenant)
        lease = Lease(self._owner, self._ingress.lease_s)
        entry = LeasedEntry(self._store.entries.patient(), tenant, answer.id, lease)
        job = Job(tenant, answer, stream, ResponseEvents(answer, _nothing), entry, work, len(asked))
        self._jobs[tenant, answer.id] = job
        response = answer.response("queued")
        events = _split(job.events.queued())
        try:
            version = await self._store.keep(tenant, response, asked, events, seen=NEW, lease=lease)
            entry.adopt(version, 1 + len(events))
        except BaseException:
            del self._jobs[tenant, answer.id]
            raise
        holding.keep()
        job.task = asyncio.create_task(self._run(job))
        job.task.add_done_callback(holding.release)
        return response

    async def cancel(self, tenant: str, response_id: str) -> Stored:
        """End a response as cancelled, unless it has ended otherwise."""
        for _ in range(MAX_ATTEMPTS):
            job = self._jobs.get((tenant, response_id))
            async with job.entry.lock if job is not None else contextlib.nullcontext():  # it adds nothing meanwhile
                if await self._cancel(tenant, response_id, job):
                    return await self._store.find(tenant, response_id)
        raise OverloadedError("the response changes too fast; try again")

    async def _cancel(self, tenant: str, response_id: str, job: Job | None) -> bool:
        """Cancels it; True if it has ended, as cancelled or otherwise; False when it has changed meanwhile."""
        stored = await self._store.find(tenant, response_id)
        response = json.loads(stored.header)
        if not response["background"]:
            raise InvalidRequestError("only a background response can be cancelled", param="response_id")
        if response["status"] in ENDED:
            return True
        if job is not None:
            response = job.answer.response("in_progress")
        if not await self._store.end(tenant, stored, response | {"status": "cancelled"}):
            return False
        if job is not None and job.task is not None:
            job.task.cancel()
            job.wake_followers()
        return True

    async def follow(self, tenant: str, response_id: str, after: int) -> AsyncIterator[bytes]:
        """The events of a response after number `after`, while it is made and to its end; b"" when none came for a
        while. The end of one that is deleted meanwhile, or whose store fails, is an event `error`."""
        position = after + 2
        try:
            async for chunks in self._tails(tenant, response_id, position):
                position += len(chunks)
                yield b"".join(chunks)
        except MantaError as error:
            described = {"code": error.code or error.type, "message": error.message, "param": error.param}
            yield utf8(event_text("error", position - 1, **described))

    async def _tails(self, tenant: str, response_id: str, position: int) -> AsyncIterator[list[bytes]]:
        silent_s = 0.0
        while True:
            job = self._jobs.get((tenant, response_id))
            changed = job.changed if job is not None else asyncio.Event()
            if job is not None:
                job.is_followed.set()
            tail = await self._store.entries.tail(tenant, response_id, position)
            if tail is None:
                raise not_found(response_id)
            if tail.chunks:
                position, silent_s = position + len(tail.chunks), 0.0
                yield tail.chunks
            elif tail.is_lost:
                await self._store.find(tenant, response_id)  # which ends it
            elif not tail.is_owned:
                return
            else:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(changed.wait(), POLL_S)
                silent_s += POLL_S
                if silent_s >= self._ingress.sse_keep_alive_s:
                    silent_s = 0.0
                    yield []

    async def _run(self, job: Job) -> None:
        def lost() -> None:
            if job.task is not None:
                job.task.cancel()

        try:
            with job.entry.beating(lambda: self._save(job), lost):
                await self._answer_and_keep(job)
        except MantaError as error:
            logger.warning("the response %s is not kept: %s", job.answer.id, error.message)
        finally:
            del self._jobs[job.tenant, job.answer.id]
            job.wake_followers()

    async def _answer_and_keep(self, job: Job) -> None:
        try:
            await self._answer(job)
            await self._write_last(job, None, job.events.end)
        except (StoreConflictError, asyncio.CancelledError):
            return  # somebody else has ended or deleted it
        except Exception as error:
            described = as_manta_error(error)
            await self._write_last(job, described, lambda: job.events.error(described))

    async def _answer(self, job: Job) -> None:
        async with job.stream as stream:
            while batch := await stream.next_batch():
                begun, job.has_begun = job.has_begun, True
                text = ("" if begun else job.events.start()) + "".join(map(job.events.event, batch))
                await self._push(job, _split(text))
                with contextlib.suppress(TimeoutError):  # a call to the store for all that comes meanwhile
                    await asyncio.wait_for(job.is_followed.wait(), POLL_S)

    async def _push(self, job: Job, events: list[bytes]) -> None:
        job.num_event_bytes += sum(map(len, events))
        job.is_cut = job.is_cut or job.num_event_bytes > MAX_EVENT_BYTES
        if not events or job.is_cut:
            return
        try:
            await job.entry.append(events)
        except StorageFullError:
            job.is_cut = True
        job.wake_followers()

    async def _save(self, job: Job) -> None:
        """Prolong the lease and keep what was said so far."""
        if job.has_begun:
            await self._write(job, job.answer.response("in_progress"))
        else:
            await job.entry.renew()

    async def _write(self, job: Job, response: dict[str, Any]) -> None:
        header = await job.work.run_later(job.cost_s, _dump, response)
        await job.entry.write(lambda: header)

    async def _write_last(self, job: Job, error: MantaError | None, event: Callable[[], str]) -> None:
        """Keep the whole response, with the event that says so: its number follows those that are kept."""

        def dump() -> tuple[bytes, list[bytes]]:
            response = job.answer.response() if error is None else job.answer.response("failed", error)
            return _dump(response), _split(event())

        job.events.number = job.entry.num_chunks - 1
        header, events = await job.work.run_later(2 * job.cost_s, dump)
        await job.entry.write(lambda: header, events, is_last=True)


def _dump(response: dict[str, Any]) -> bytes:
    return json.dumps(response).encode()


def _split(text: str) -> list[bytes]:
    """Events one by one; a blank line ends each, and JSON has none within."""
    return [utf8(f"{event}\n\n") for event in text.split("\n\n") if event]


async def _nothing() -> None:
    """A background response is kept all along."""
