"""Answers under their keys in the store of tenants: the ingress replica that makes one writes it there as it comes.

An entry's header says whose request it answers, and, once that is known, status and headers; its chunks from number
`first` on are the body, compressed piece by piece. Its owner's lease tells whether somebody makes it still.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import logging
import uuid
import zlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from starlette.types import Message

from app.api.idempotency.answer import RunningAnswer
from app.api.idempotency.key import IdempotentRequest, KeyInUseError
from app.api.store.entries import NEW, Birth, Lease, Seen, StorageFullError, StoreConflictError, Stored
from app.api.store.leased_entry import LeasedEntry
from app.api.store.tenant_store import TenantStore
from app.errors import EngineDeadError, MantaError

WRITE_S = 0.25  # how often a running answer is written, and one that runs elsewhere is looked at
RUNNING_S = 86_400.0  # an entry that nobody ends is forgotten after so long
PIECE_BYTES = 1 << 20  # of an answer, in one chunk
INLINE_BYTES = 1 << 15  # what the event loop packs itself
REPLAYED = (b"idempotent-replayed", b"true")

T = TypeVar("T")
U = TypeVar("U")

logger = logging.getLogger("manta.api")


@dataclass(slots=True, frozen=True)
class AnswerHeader:
    """The header of an entry."""

    fingerprint: str
    run: str = ""  # who made it: bytes of two runs do not join
    first: int = 0  # chunks before it are of an earlier run, whose server was lost
    status: int = 0  # 0: not known yet
    headers: tuple[tuple[str, str], ...] = ()
    kept: int = 1  # 0: too long, or there is no room; the entry stays until its run has ended

    @classmethod
    def load(cls, raw: bytes) -> AnswerHeader:
        """The header as it was kept."""
        kept = json.loads(raw)
        return cls(**kept | {"headers": tuple(map(tuple, kept["headers"]))})

    def dump(self) -> bytes:
        """The header as it is kept."""
        return json.dumps(dataclasses.asdict(self)).encode()

    def of(self, answer: RunningAnswer) -> AnswerHeader:
        """This header, with what is known of the answer."""
        headers = tuple((name.decode("latin-1"), value.decode("latin-1")) for name, value in answer.headers)
        return dataclasses.replace(self, status=answer.status, headers=headers)


class AnswerStore:
    """The kept answers of all tenants. They are kept `kept_s` from their end."""

    def __init__(self, store: TenantStore, lease_s: float, kept_s: float, max_running: int) -> None:
        self._store = store
        self._lease_s = lease_s
        self._kept_s = kept_s
        self._max_running = max_running

    async def find(self, request: IdempotentRequest) -> Stored | None:
        """The entry of its key; KeyReusedError when that is another request's."""
        stored = await self._store.get(request.tenant, request.key)
        if stored is not None:
            request.check(AnswerHeader.load(stored.header).fingerprint)
        return stored

    async def begin(self, request: IdempotentRequest, lost: Stored | None) -> KeptAnswer | None:
        """The entry to write the answer to, new or in place of a `lost` one; None when another was first.

        OverloadedError when too many of the tenant's are under way, StorageFullError where there is no room.
        """
        place, lease = (request.tenant, request.key), Lease(uuid.uuid4().hex, self._lease_s)  # its owner is this run
        header = AnswerHeader(request.fingerprint, lease.owner, 0 if lost is None else lost.num_chunks)
        options: dict[str, Any] = {"lease": lease, "expires_s": RUNNING_S, "born": Birth(max_owned=self._max_running)}
        seen = NEW if lost is None else Seen(lost.version, lost.num_chunks)
        try:
            version = await self._store.patient().put(*place, header.dump(), seen=seen, **options)
        except StoreConflictError:
            return None
        entry = LeasedEntry(self._store.patient(), *place, lease, version, header.first)
        return KeptAnswer(entry, header, self._kept_s)

    async def replay(self, request: IdempotentRequest) -> AsyncIterator[Message]:
        """The messages of an answer that another replica makes or has made, from the first on.

        Nothing at all when there is none to replay, so that it must run. EngineDeadError when its server is lost, or
        the entry gone, after the beginning.
        """
        while True:
            stored = await self.find(request)
            if stored is None or stored.is_lost:
                return
            header = AnswerHeader.load(stored.header)
            if not header.kept:
                raise KeyInUseError
            if header.status:
                break
            await asyncio.sleep(WRITE_S)
        headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in header.headers]
        yield {"type": "http.response.start", "status": header.status, "headers": headers}
        async for chunk in self._chunks(request, header):
            yield {"type": "http.response.body", "body": chunk, "more_body": True}
        yield {"type": "http.response.body", "body": b"", "more_body": False}

    async def _chunks(self, request: IdempotentRequest, header: AnswerHeader) -> AsyncIterator[bytes]:
        place = header.first
        while True:
            tail = await self._store.tail(request.tenant, request.key, place)
            stored = await self.find(request)  # after the tail: a run that it is still, it was then
            now = header if stored is None else AnswerHeader.load(stored.header)
            is_another = stored is None or now.run != header.run
            if not now.kept:
                raise EngineDeadError("the answer grew too long to be kept: send the request again")
            if tail is None or is_another or (tail.is_lost and not tail.chunks):
                raise EngineDeadError("the server that made this answer is gone: send the request again")
            if tail.chunks:
                place += len(tail.chunks)
                for chunk in tail.chunks:
                    yield await _beside(len(chunk), zlib.decompress, chunk)
            elif tail.is_owned:
                await asyncio.sleep(WRITE_S)
            else:
                return


class KeptAnswer:
    """The entry that an answer is written to while it is made."""

    def __init__(self, entry: LeasedEntry, header: AnswerHeader, kept_s: float) -> None:
        self._entry = entry
        self._header = header
        self._kept_s = kept_s
        self._num_written = 0  # parts of the answer
        self._is_unsure = False  # whether the store has more than that

    async def write_along(self, answer: RunningAnswer) -> None:
        """Write what comes, and prolong the lease, until the answer has ended.

        Where it cannot be kept, the entry says so and stays: the next request of the key must not run beside this one.
        """
        lost = asyncio.Event()
        try:
            with self._entry.beating(self._entry.renew, lost.set):
                while not answer.is_over and not lost.is_set():
                    await answer.wait_over(WRITE_S)
                    await self._write(answer)
        except StoreConflictError:
            return  # somebody took the entry over, when its lease had run out
        except EngineDeadError as error:
            self._is_unsure = True
            logger.warning("the store of answers: %s", error.message)

    async def _write(self, answer: RunningAnswer) -> None:
        if not self._header.kept:
            return
        try:
            if answer.is_whole:
                await self._write_new(answer)
                return
        except StorageFullError:
            logger.info("there is no room for an answer under its key")
        # It has fewer bytes than before, so there is room for it.
        self._header = dataclasses.replace(self._header, kept=0, status=0, headers=())
        await self._entry.write(self._header.dump)

    async def _write_new(self, answer: RunningAnswer) -> None:
        if answer.status and not self._header.status:
            self._header = self._header.of(answer)
            await self._entry.write(self._header.dump)
        num_parts = answer.num_parts
        if pieces := await self._unwritten(answer):
            await self._entry.append(pieces)
            self._num_written = num_parts

    async def finish(self, answer: RunningAnswer) -> None:
        """Keep the whole answer for later; where that cannot be, nothing."""
        if self._is_unsure or not self._header.kept:  # its last piece may be there, and would be there twice
            await self.drop()
            return
        header = self._header.of(answer).dump()
        try:
            pieces = await self._unwritten(answer)
            await self._entry.write(lambda: header, pieces, is_last=True, expires_s=self._kept_s)
        except StorageFullError:
            await self.drop()
        except MantaError as error:
            logger.warning("an answer is not kept under its key: %s", error.message)

    async def drop(self) -> None:
        """Let the next request of the key run."""
        with contextlib.suppress(MantaError):
            await self._entry.write(self._header.dump, is_last=True, expires_s=0.0)

    async def _unwritten(self, answer: RunningAnswer) -> list[bytes]:
        parts = answer.parts(self._num_written) if answer.is_whole else []
        return await _beside(sum(map(len, parts)), _compressed, parts)


def _compressed(parts: list[bytes]) -> list[bytes]:
    """Chunks that each are little work to read again."""
    body = memoryview(b"".join(parts))
    return [zlib.compress(body[i : i + PIECE_BYTES], 1) for i in range(0, len(body), PIECE_BYTES)]


async def _beside(num_bytes: int, call: Callable[[T], U], argument: T) -> U:
    """Returns what `call` does; in a thread, where zlib lets the interpreter lock go, unless the bytes are few."""
    return call(argument) if num_bytes <= INLINE_BYTES else await asyncio.to_thread(call, argument)
