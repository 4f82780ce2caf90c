"""One batch under way: its lines are checked, then sent as requests, and each answer is written once.

A batch that another process has begun is gone on with: the results that it has written say which lines are done.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from app.api.batches.batch import MAX_ERRORS, Batch
from app.api.batches.file_store import FileStore
from app.api.batches.lines import BadLine, BatchRequest, parse_line
from app.api.batches.turns import Turns
from app.api.in_process import Answer
from app.api.store.entries import Lease, StoreConflictError
from app.api.store.leased_entry import LeasedEntry
from app.api.work_pool import PARSE_S_PER_BYTE, RequestWork, WorkPool
from app.errors import EngineDeadError, InvalidRequestError, MantaError, OverloadedError

FIRST_WAIT_S, LONGEST_WAIT_S = 0.5, 30.0
TRY_LATER = frozenset({429, 502, 503, 504})
MAX_FAULT_CHARS = 512
PRIORITY = 1000  # for a request without one of its own: after those that somebody waits for

logger = logging.getLogger("manta.api")


@dataclass(slots=True, frozen=True)
class Tools:
    """What every batch of an ingress replica is run with."""

    post: Callable[[str, bytes, str], Awaitable[Answer]]  # path, JSON, tenant
    files: FileStore
    turns: Turns
    pool: WorkPool
    max_lines: int
    max_line_bytes: int
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
        """Whether all lines are requests to the batch's route; else it has failed."""
        errors, seen = [], set()
        async for line in self._lines():
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
            batch.counts[count] = 0
            async for raw in tools.files.lines(self.tenant, name, 1 << 62):
                self._done.add(str((await self._work(len(raw), json.loads, raw))["custom_id"]))
                batch.counts[count] += 1

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
        room = asyncio.Semaphore(self.tools.concurrency)

        async def one(request: BatchRequest) -> None:
            try:
                await self._answer(request)
            finally:
                room.release()

        try:
            async with asyncio.TaskGroup() as group:
                async for line in self._lines():
                    if isinstance(line, BatchRequest) and line.custom_id not in self._done:
                        await room.acquire()
                        group.create_task(one(line))
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
            except OverloadedError:  # nothing is free to read the answer
                answer = Answer(OverloadedError.status, None)
            finally:
                await asyncio.shield(self.tools.turns.release(self.tenant))
            if answer.status not in TRY_LATER:
                break
            await asyncio.sleep(max(wait_s, min(answer.retry_after_s or 0.0, LONGEST_WAIT_S)))
            wait_s = min(2 * wait_s, LONGEST_WAIT_S)
        response = {"status_code": answer.status, "request_id": answer.request_id, "body": answer.body}
        await self._write(request.custom_id, response, None, answer.status < 400, answer.num_bytes)

    async def _write(self, custom_id: str, response: Any, error: Any, is_good: bool, num_bytes: int = 0) -> None:
        """Append one result; a line is done from the moment that its result is on its way."""
        entry = {"id": f"batch_req_{uuid.uuid4().hex}", "custom_id": custom_id, "response": response, "error": error}
        line = await self._work(num_bytes, _line, entry)
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
        async for line in self._lines():
            if isinstance(line, BatchRequest) and line.custom_id not in self._done:
                await self._write(line.custom_id, None, error, False)

    async def _finish_files(self) -> None:
        """Show the files that have content, forget the others."""
        await asyncio.gather(*self._writing, return_exceptions=True)
        batch, files = self.batch, self.tools.files
        for name, shown in (("output", "output_file_id"), ("errors", "error_file_id")):
            file_id = getattr(batch, name)
            stored = await files.entries.get(self.tenant, file_id) if file_id else None
            if stored is not None and stored.num_chunks:
                await files.finish(self.tenant, file_id, batch.output_expires_s)
                batch.shown[shown] = file_id
            elif stored is not None:
                await files.discard(self.tenant, file_id)

    async def _lines(self) -> AsyncIterator[BatchRequest | BadLine]:
        """The lines of the input that are not empty, parsed beside the event loop where they are long."""
        number, file_id = 0, self.batch.shown["input_file_id"]
        await self.tools.files.find(self.tenant, file_id)
        async for raw in self.tools.files.lines(self.tenant, file_id, self.tools.max_line_bytes):
            number += 1
            if number % 100 == 0:
                await asyncio.sleep(0)  # others want the event loop too
            if raw.strip():
                yield await self._work(len(raw), parse_line, number, raw)

    async def _work(self, num_bytes: int, call: Callable[..., Any], *arguments: Any) -> Any:
        return await RequestWork(self.tools.pool, self.tenant).run_later(num_bytes * PARSE_S_PER_BYTE, call, *arguments)


def _payload(request: BatchRequest) -> bytes:
    return json.dumps({"priority": PRIORITY, **request.body}).encode()


def _line(entry: dict[str, Any]) -> bytes:
    return json.dumps(entry).encode() + b"\n"


def _error(code: str, message: str, line: int | None = None) -> dict[str, Any]:
    return {"code": code, "message": message, "line": line, "param": None}


def _first(errors: BaseExceptionGroup[MantaError]) -> BaseException:
    """The first exception inside that is not a group."""
    inner = errors.exceptions[0]
    return _first(inner) if isinstance(inner, BaseExceptionGroup) else inner
