"""One batch under way: its lines are checked, then sent as requests, and each answer is written once.

A batch that another process has begun is gone on with: the results that it has written say which lines are done.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, cast

import msgspec

from app.api.batches.batch import MAX_ERRORS, Batch
from app.api.batches.file_store import FileStore
from app.api.batches.line_room import LineRoom
from app.api.batches.lines import BadLine, BatchRequest, members, parse_line
from app.api.batches.turns import Turns
from app.api.http.in_process import Answer
from app.api.http.json_response import written
from app.api.http.work_pool import PARSE_S_PER_BYTE, RequestWork, WorkPool
from app.api.store.entries import Lease, StoreConflictError
from app.api.store.leased_entry import LeasedEntry
from app.errors import EngineDeadError, InvalidRequestError, MantaError

FIRST_WAIT_S, LONGEST_WAIT_S = 0.5, 30.0
TRY_LATER = frozenset({429, 502, 503, 504})
MAX_FAULT_CHARS = 512
MAX_TAKEOVERS = 5  # one after the other, without any progress
BLOCK_LINES, BLOCK_BYTES = 256, 1 << 20  # that are parsed at a time
PRIORITY = 1000  # for a request without one of its own: after those that somebody waits for

logger = logging.getLogger("manta.api")


@dataclass(slots=True, frozen=True)
class Tools:
    """Holds what every batch of an ingress replica is run with."""

    post: Callable[[str, bytes, str], Awaitable[Answer]]  # path, JSON, tenant
    files: FileStore
    turns: Turns
    room: LineRoom
    pool: WorkPool
    max_lines: int
    max_line_bytes: int
    max_depth: int  # of a line's body
    concurrency: int
    owner: str
    lease_s: float


@dataclass(slots=True)
class BatchRun:
    """The work on `batch`, whose entry `save` writes. `stop` ends it as cancelled."""

    tools: Tools
    tenant: str
    batch: Batch
    save: Callable[[], Awaitable[None]]
    is_stopped: bool = False
    is_late: bool = False  # the window closed before all lines were done
    _done: set[str] = field(default_factory=set)  # custom_ids that have a result
    _sending: asyncio.Task[None] | None = None
    _results: dict[str, LeasedEntry] = field(default_factory=dict)  # the files of results
    _writing: set[asyncio.Task[None]] = field(default_factory=set)  # results on their way

    def stop(self) -> None:
        """End it: what is under way is aborted."""
        self.is_stopped = True
        if self._sending is not None:
            self._sending.cancel()

    async def run(self) -> None:
        """Run the batch to its end, which its status tells. StoreConflictError when it is no longer ours."""
        batch = self.batch
        try:
            if batch.num_takeovers > MAX_TAKEOVERS:  # likely because of it: it would go on for ever
                raise InvalidRequestError(
                    f"{batch.num_takeovers} servers were lost while they worked on it, and no line was answered"
                )
            if batch.status == "validating" and not await self._check():
                return
            await self._take_files()
            if batch.status == "in_progress" and not self.is_stopped:
                await self._send()
            ending = "cancelled" if batch.status == "cancelling" else "expired" if self.is_late else "completed"
            if ending == "expired":
                await self._write_expired()
            if ending == "completed":
                batch.becomes("finalizing")
                await self.save()
            await self._finish_files()
            batch.becomes(ending)
        except InvalidRequestError as error:  # no room for results, or the input is gone
            await self._finish_files()
            batch.fails([_error(error.code or "invalid_request", error.message)])
        except (StoreConflictError, EngineDeadError):  # somebody else goes on with it, or this replica, later
            raise
        except Exception:
            logger.exception("the batch %s", batch.id)
            await self._finish_files()
            batch.fails([_error("server_error", "internal server error")])

    async def _check(self) -> bool:
        """Checks that all lines are requests to the batch's route; False: one is not, and the batch has failed."""
        errors, seen = [], set()
        async with aclosing(self._lines()) as lines:
            async for line in lines:
                fault, code = (line.message, "invalid_line") if isinstance(line, BadLine) else (None, "")
                if isinstance(line, BatchRequest):
                    if line.url != self.batch.shown["endpoint"]:
                        fault, code = f"url: {line.url} is not the batch's endpoint", "mismatched_endpoint"
                    elif line.custom_id in seen:
                        fault, code = f"custom_id {line.custom_id[:256]!r} is there twice", "duplicate_custom_id"
                    seen.add(line.custom_id)
                if fault is not None:
                    errors.append(_error(code, fault[:MAX_FAULT_CHARS], line.number))
                if len(seen) > self.tools.max_lines:
                    errors.append(_error("too_many_requests", f"more than {self.tools.max_lines} requests"))
                if len(errors) >= MAX_ERRORS or len(seen) > self.tools.max_lines:
                    break
        if not seen and not errors:
            errors = [_error("empty_file", "the file has no requests")]
        if errors:
            self.batch.fails(errors)
            return False
        self.batch.counts["total"] = len(seen)
        if not self.is_stopped:
            self.batch.becomes("in_progress")
        return True

    async def _take_files(self) -> None:
        """The files of results: new, or those of who had the batch before, with what is done already."""
        batch, tools = self.batch, self.tools
        if not batch.output:
            for name in ("output", "errors"):
                filename = f"{batch.id}_{name.removesuffix('s')}.jsonl"
                made = await tools.files.create(self.tenant, filename, "batch_output", tools.owner, tools.lease_s)
                setattr(batch, name, made)
                self._results[made] = self._leased(made, 0)
            await self.save()
            return
        for name, count in ((batch.output, "completed"), (batch.errors, "failed")):
            taken = await tools.files.take(self.tenant, name, tools.owner, tools.lease_s)
            if taken is None:
                raise InvalidRequestError("the files of results are gone")
            self._results[name] = self._leased(name, taken.num_chunks)
            batch.counts[count] = batch.num_expired = 0
            async for raw in tools.files.lines(self.tenant, name, 1 << 62):
                custom_id, is_expired = await self._work(len(raw), _written, raw)
                self._done.add(custom_id)
                batch.counts[count] += 1
                batch.num_expired += is_expired

    def _leased(self, file_id: str, num_chunks: int) -> LeasedEntry:
        tools = self.tools
        entries = tools.files.entries
        return LeasedEntry(entries, self.tenant, file_id, Lease(tools.owner, tools.lease_s), num_chunks=num_chunks)

    async def _send(self) -> None:
        self._sending = asyncio.create_task(self._send_all())
        try:
            await asyncio.wait_for(self._sending, max(0.0, self.batch.shown["expires_at"] - time.time()))
        except TimeoutError:
            self.is_late = len(self._done) < self.batch.counts["total"]
        except asyncio.CancelledError:
            if not self.is_stopped:
                raise
        finally:
            self._sending.cancel()

    async def _send_all(self) -> None:
        turns = asyncio.Semaphore(self.tools.concurrency)
        room = self.tools.room

        def begin(request: BatchRequest, group: asyncio.TaskGroup) -> None:
            held = 2 * request.num_bytes  # as it came, and as it is sent
            room.add(self.tenant, held)

            def end(_: object) -> None:
                turns.release()
                room.release(self.tenant, held)

            group.create_task(self._answer(request)).add_done_callback(end)  # also of one that has not begun

        try:
            async with asyncio.TaskGroup() as group, aclosing(self._lines()) as lines:
                async for line in lines:
                    if isinstance(line, BatchRequest) and line.custom_id not in self._done:
                        await turns.acquire()
                        begin(line, group)
        except* MantaError as errors:
            raise _first(errors) from None

    async def _answer(self, request: BatchRequest) -> None:
        """Send one request until there is an answer, and write that."""
        payload = await self._work(request.num_bytes, _payload, request)
        wait_s = FIRST_WAIT_S
        while True:
            await self.tools.turns.acquire(self.tenant)
            try:
                answer = await self.tools.post(request.url, payload, self.tenant)
            finally:
                self.tools.turns.release(self.tenant)
            if answer.status not in TRY_LATER:
                break
            await asyncio.sleep(max(wait_s, min(answer.retry_after_s or 0.0, LONGEST_WAIT_S)))
            wait_s = min(2 * wait_s, LONGEST_WAIT_S)
        await self._write(request.custom_id, answer, None)

    async def _write(self, custom_id: str, answer: Answer | None, error: Any) -> None:
        """Append one result; a line is done from the moment that its result is on its way."""
        num_bytes, is_good = (len(answer.raw), answer.status < 400) if answer is not None else (0, False)
        line = await self._work(num_bytes, _line, custom_id, answer, error)
        self._done.add(custom_id)
        writing = asyncio.create_task(self._append(line, is_good))
        self._writing.add(writing)
        writing.add_done_callback(self._writing.discard)
        await asyncio.shield(writing)

    async def _append(self, line: bytes, is_good: bool) -> None:
        name, count = (self.batch.output, "completed") if is_good else (self.batch.errors, "failed")
        await self._results[name].append([line])
        self.batch.counts[count] += 1

    async def _write_expired(self) -> None:
        error = {"code": "batch_expired", "message": "the completion window closed before this request was answered"}
        async with aclosing(self._lines()) as lines:
            async for line in lines:
                if isinstance(line, BatchRequest) and line.custom_id not in self._done:
                    await self._write(line.custom_id, None, error)
                    self.batch.num_expired += 1

    async def _finish_files(self) -> None:
        """Show the files that have content."""
        await asyncio.gather(*self._writing, return_exceptions=True)
        batch, files = self.batch, self.tools.files
        for name, shown in (("output", "output_file_id"), ("errors", "error_file_id")):
            file_id = getattr(batch, name)
            stored = await files.entries.get(self.tenant, file_id) if file_id else None
            if stored is not None and stored.num_chunks:
                await files.finish(self.tenant, file_id, batch.output_expires_s)
                batch.shown[shown] = file_id

    async def forget_empty(self) -> None:
        """Delete the files of results that have no content, once the batch is known to have ended: who goes on with it
        looks for both."""
        for name, shown in (("output", "output_file_id"), ("errors", "error_file_id")):
            file_id = getattr(self.batch, name)
            if file_id and not self.batch.shown.get(shown):
                await self.tools.files.discard(self.tenant, file_id)

    async def _lines(self) -> AsyncGenerator[BatchRequest | BadLine, None]:
        """The lines of the input that are not empty, parsed some at a time beside the event loop.

        InvalidRequestError for a file of too many lines: empty ones are work too.
        """
        number, tools = 0, self.tools
        await tools.files.find(self.tenant, self.batch.shown["input_file_id"])
        raw_lines = tools.files.lines(self.tenant, self.batch.shown["input_file_id"], tools.max_line_bytes)
        is_over = False
        while not is_over:
            held = BLOCK_BYTES + tools.max_line_bytes  # as large as a block may be
            await tools.room.acquire(self.tenant, held)
            try:
                block, num_bytes, is_over = [], 0, True
                async for raw in raw_lines:
                    number += 1
                    if number > 2 * tools.max_lines:
                        most = 2 * tools.max_lines
                        raise InvalidRequestError(f"the file has more than {most} lines, empty ones among them")
                    if raw.strip():
                        block.append((number, raw))
                        num_bytes += len(raw)
                    if num_bytes >= BLOCK_BYTES or len(block) >= BLOCK_LINES:
                        is_over = False
                        break
                lines = await self._parse(block, num_bytes)
                del block
                tools.room.release(self.tenant, held - num_bytes)
                held = num_bytes
                for line in lines:
                    yield line
            finally:
                tools.room.release(self.tenant, held)

    async def _parse(self, block: list[tuple[int, bytes]], num_bytes: int) -> list[BatchRequest | BadLine]:
        num_bytes += BLOCK_BYTES // BLOCK_LINES * len(block)  # a line is work too, however short
        return cast(list[BatchRequest | BadLine], await self._work(num_bytes, _parse_all, block, self.tools.max_depth))

    async def _work(self, num_bytes: int, call: Callable[..., Any], *arguments: Any) -> Any:
        return await RequestWork(self.tools.pool, self.tenant).run_later(num_bytes * PARSE_S_PER_BYTE, call, *arguments)


def _parse_all(block: list[tuple[int, bytes]], max_depth: int) -> list[BatchRequest | BadLine]:
    return [parse_line(number, raw, max_depth) for number, raw in block]


def _payload(request: BatchRequest) -> bytes:
    """The bytes that came, with a priority where they name none."""
    named = members(request.body)
    if "priority" in named:
        return request.body
    return b'{"priority": %d%s%s' % (PRIORITY, b", " if named else b"", request.body[1:])


def _line(custom_id: str, answer: Answer | None, error: Any) -> bytes:
    """One result; the answer's JSON stands in it as it is."""
    response: dict[str, Any] | None = None
    if answer is not None:
        response = {"status_code": answer.status, "request_id": answer.request_id, "body": _in_one_line(answer)}
    entry = {"id": f"batch_req_{uuid.uuid4().hex}", "custom_id": custom_id, "response": response, "error": error}
    return msgspec.json.encode(entry) + b"\n"


def _in_one_line(answer: Answer) -> msgspec.Raw:
    try:
        if b"\n" not in answer.raw:
            return msgspec.json.decode(answer.raw, type=msgspec.Raw)
    except ValueError:
        logger.warning("the answer %s of a batch is no JSON", answer.request_id)
    return written(answer.body)


class _Result(msgspec.Struct):
    """Holds what is read of a result again; the rest is passed over."""

    custom_id: str
    error: Any = None


def _written(raw: bytes) -> tuple[str, bool]:
    """The id of a result, and whether its window had closed."""
    result = msgspec.json.decode(raw, type=_Result)
    return result.custom_id, result.error is not None


def _error(code: str, message: str, line: int | None = None) -> dict[str, Any]:
    return {"code": code, "message": message, "line": line, "param": None}


def _first(errors: BaseExceptionGroup[MantaError]) -> BaseException:
    """The first exception inside that is not a group."""
    inner = errors.exceptions[0]
    return _first(inner) if isinstance(inner, BaseExceptionGroup) else inner
