"""/v1/messages/batches: Anthropic's batches, which run as OpenAI's do, and are kept beside them.

The requests of a body become the lines of a file; what the run writes to its files is shown as Anthropic's results.
"""

from __future__ import annotations

import contextlib
import json
import uuid
from collections.abc import AsyncIterator, Iterator, Mapping
from datetime import UTC, datetime
from typing import Any, ClassVar

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import StreamingResponse

from app.api.batches.batch import RUNNING, Batch
from app.api.batches.file_store import CHUNK_BYTES, FileNotFoundHereError, FileStore
from app.api.batches.lines import BadLine, parse_line
from app.api.batches.runner import BatchNotFoundError, BatchRunner
from app.api.http.body import describe_body, read_body
from app.api.http.errors import anthropic_error_body
from app.api.http.json_response import JSONResponse
from app.api.http.query import int_param, list_page, text_param
from app.api.http.strict_models import StrictModel
from app.api.http.work_pool import PARSE_S_PER_BYTE, RequestWork, work_of
from app.api.store.entries import StoreConflictError, Stored
from app.api.store.tenant_store import TenantStore
from app.bounds import Items, JsonObject
from app.errors import InvalidRequestError

URL = "/v1/messages"
PREFIX = "msgbatch"
LABEL = "messages"  # of the entries, so that each dialect lists its own
WINDOW_H = 24
WRITE_LEASE_S = 600.0
_WAITING = ("validating", "in_progress", "finalizing")


class MessageBatchRequest(StrictModel):
    """One request of a batch."""

    custom_id: str = Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$", description="Names the result; unique in the batch.")
    params: JsonObject = Field(description="The body of a request to /v1/messages; not a stream.")


class MessageBatchBody(StrictModel):
    """Body of POST /v1/messages/batches."""

    refused: ClassVar[Mapping[str, str]] = {
        "user_profile_id": "there are no user profiles",
        "workspace_id": "there are no workspaces",
    }
    is_lenient: ClassVar[bool] = True

    requests: Items[MessageBatchRequest] = Field(min_length=1, description="The requests.")


class MessageBatches:
    """The message batches of all tenants."""

    def __init__(self, runner: BatchRunner, files: FileStore, batches: TenantStore, max_requests: int) -> None:
        self._runner = runner
        self._files = files
        self._batches = batches
        self._max_requests = max_requests

    async def begin(self, work: RequestWork, tenant: str, body: MessageBatchBody, num_bytes: int) -> Batch:
        """Keep the requests as a file and begin with them. InvalidRequestError names a request at fault."""
        if len(body.requests) > self._max_requests:
            raise InvalidRequestError(f"{len(body.requests)} requests; at most {self._max_requests}", param="requests")
        chunks = await work.run(2 * num_bytes * PARSE_S_PER_BYTE, lambda: list(_chunks(body.requests)))
        file_id = await self._keep(tenant, chunks)
        batch = Batch.made(PREFIX, file_id, URL, WINDOW_H)
        batch.counts["total"] = len(body.requests)
        try:
            await self._runner.begin(tenant, batch, LABEL)
        except BaseException:
            await self._files.discard(tenant, file_id)
            raise
        return batch

    async def _keep(self, tenant: str, chunks: list[bytes]) -> str:
        await self._files.entries.check_room(tenant, sum(map(len, chunks)))
        owner = uuid.uuid4().hex
        file_id = await self._files.create(tenant, f"{PREFIX}.jsonl", "batch", owner, WRITE_LEASE_S)
        try:
            for chunk in chunks:
                await self._files.entries.append(tenant, file_id, [chunk], owner)
            await self._files.finish(tenant, file_id)
        except BaseException:
            await self._files.discard(tenant, file_id)
            raise
        return file_id

    async def find(self, tenant: str, batch_id: str) -> Batch:
        """A batch as it was last stored; BatchNotFoundError where there is none of this dialect."""
        self._runner.start()
        if not batch_id.startswith(f"{PREFIX}_"):
            raise BatchNotFoundError(f"there is no batch {batch_id[:256]!r}", param="message_batch_id")
        return (await self._runner.find(tenant, batch_id))[0]

    async def cancel(self, tenant: str, batch_id: str) -> Batch:
        """End a batch; what is done keeps its result."""
        batch = await self.find(tenant, batch_id)
        return await self._runner.cancel(tenant, batch_id) if batch.status in _WAITING else batch

    async def delete(self, tenant: str, batch_id: str) -> None:
        """Forget a batch that has ended, and its files."""
        batch = await self.find(tenant, batch_id)
        if batch.status in RUNNING:
            raise InvalidRequestError("the batch has not ended; cancel it first", param="message_batch_id")
        for file_id in (batch.shown["input_file_id"], batch.shown["output_file_id"], batch.shown["error_file_id"]):
            with contextlib.suppress(FileNotFoundHereError):
                await self._files.delete(tenant, file_id or "")
        await self._batches.delete(tenant, batch_id)

    async def page(self, tenant: str, before: str | None, after: str | None, limit: int) -> tuple[list[Batch], bool]:
        """Batches, the newest first, behind `after` or up to `before`, and whether there are more that way."""
        try:
            found: list[Stored] = await self._batches.page(
                tenant, before or after, limit + 1, newest_first=before is None, label=LABEL
            )
        except StoreConflictError:
            name = "before_id" if before else "after_id"
            raise InvalidRequestError(f"there is no batch {(before or after or '')[:256]!r}", param=name) from None
        shown = [Batch.load(stored.header) for stored in found[:limit]]
        return shown[::-1] if before else shown, len(found) > limit

    async def results(self, work: RequestWork, tenant: str, batch: Batch) -> AsyncIterator[bytes]:
        """The lines of the results, those that were answered first."""
        seen: set[str] = set()
        for file_id in (batch.shown["output_file_id"], batch.shown["error_file_id"]):
            async for raw in self._files.lines(tenant, file_id or "", 1 << 62):
                custom_id, line = await work.run(2 * len(raw) * PARSE_S_PER_BYTE, _answered, raw)
                seen.add(custom_id)
                yield line
        async for raw in self._files.lines(tenant, batch.shown["input_file_id"], 1 << 62):
            custom_id = await work.run(len(raw) * PARSE_S_PER_BYTE, _custom_id, raw)
            if custom_id not in seen:
                yield _line(custom_id, _left(batch))


def message_batch_routes(own: MessageBatches) -> APIRouter:
    """Anthropic's endpoints of batches."""
    router = APIRouter(tags=["anthropic"])

    @router.post("/v1/messages/batches", openapi_extra=describe_body(MessageBatchBody))
    async def create_message_batch(request: Request) -> JSONResponse:
        """Answer many requests, while others wait for nothing."""
        body = await read_body(request, MessageBatchBody)
        batch = await own.begin(work_of(request), request.state.tenant, body, request.state.num_body_bytes)
        return JSONResponse(shown(batch))

    @router.get("/v1/messages/batches")
    async def list_message_batches(request: Request) -> JSONResponse:
        """The message batches of the caller, the newest first, in pages."""
        before, after = text_param(request, "before_id"), text_param(request, "after_id")
        if before and after:
            raise InvalidRequestError("excludes after_id", param="before_id")
        found, has_more = await own.page(request.state.tenant, before, after, int_param(request, "limit", 20, 1, 1000))
        page = list_page([shown(batch) for batch in found], has_more)
        return JSONResponse({name: value for name, value in page.items() if name != "object"})

    @router.get("/v1/messages/batches/{message_batch_id}")
    async def retrieve_message_batch(request: Request, message_batch_id: str) -> JSONResponse:
        """The status of a message batch."""
        return JSONResponse(shown(await own.find(request.state.tenant, message_batch_id)))

    @router.post("/v1/messages/batches/{message_batch_id}/cancel")
    async def cancel_message_batch(request: Request, message_batch_id: str) -> JSONResponse:
        """End a message batch; what is done keeps its result."""
        return JSONResponse(shown(await own.cancel(request.state.tenant, message_batch_id)))

    @router.delete("/v1/messages/batches/{message_batch_id}")
    async def delete_message_batch(request: Request, message_batch_id: str) -> JSONResponse:
        """Forget a message batch that has ended, with its results."""
        await own.delete(request.state.tenant, message_batch_id)
        return JSONResponse({"id": message_batch_id, "type": "message_batch_deleted"})

    @router.get("/v1/messages/batches/{message_batch_id}/results")
    async def message_batch_results(request: Request, message_batch_id: str) -> StreamingResponse:
        """The results of a message batch that has ended, as lines of JSON."""
        batch = await own.find(request.state.tenant, message_batch_id)
        if batch.status in RUNNING:
            raise InvalidRequestError("the batch has not ended", param="message_batch_id")
        lines = own.results(work_of(request), request.state.tenant, batch)
        return StreamingResponse(lines, media_type="application/x-jsonl")

    return router


def shown(batch: Batch) -> dict[str, Any]:
    """A batch as Anthropic shows it. The address of its results is below that of the API, as SDKs resolve it."""
    fields, has_ended = batch.shown, batch.status not in RUNNING
    ended_at = fields.get(f"{batch.status}_at") if has_ended else None
    return {
        "id": batch.id,
        "type": "message_batch",
        "processing_status": "ended" if has_ended else "canceling" if batch.status == "cancelling" else "in_progress",
        "request_counts": _counts(batch, has_ended),
        "created_at": _time(fields["created_at"]),
        "expires_at": _time(fields["expires_at"]),
        "ended_at": _time(ended_at),
        "cancel_initiated_at": _time(fields.get("cancelling_at")),
        "archived_at": None,
        "results_url": f"{URL}/batches/{batch.id}/results" if has_ended else None,
    }


def _counts(batch: Batch, has_ended: bool) -> dict[str, int]:
    """Numbers of requests; until the batch has ended all are processing, as at Anthropic."""
    counts = {"processing": 0, "succeeded": 0, "errored": 0, "canceled": 0, "expired": 0}
    total, completed, failed = (batch.counts[name] for name in ("total", "completed", "failed"))
    if not has_ended:
        return counts | {"processing": total}
    left = total - completed - failed
    kind = "canceled" if batch.status == "cancelled" else "errored"
    counts |= {"succeeded": completed, "errored": failed - batch.num_expired, "expired": batch.num_expired}
    return counts | {kind: counts[kind] + left}


def _time(seconds: int | None) -> str | None:
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


def _chunks(requests: list[MessageBatchRequest]) -> Iterator[bytes]:
    """The requests as lines of a file, in chunks. InvalidRequestError names one that is no request."""
    seen: set[str] = set()
    held, num_bytes = [], 0
    for i, request in enumerate(requests):
        if request.custom_id in seen:
            raise InvalidRequestError("is there twice", param=f"requests.{i}.custom_id")
        seen.add(request.custom_id)
        entry = {"custom_id": request.custom_id, "method": "POST", "url": URL, "body": request.params}
        line = json.dumps(entry).encode()
        parsed = parse_line(i + 1, line)
        if isinstance(parsed, BadLine):
            raise InvalidRequestError(parsed.message.replace("body", "params", 1), param=f"requests.{i}.params")
        held.append(line + b"\n")
        num_bytes += len(line)
        if num_bytes >= CHUNK_BYTES:
            yield b"".join(held)
            held, num_bytes = [], 0
    yield b"".join(held)


def _custom_id(raw: bytes) -> str:
    return str(json.loads(raw)["custom_id"])


def _answered(raw: bytes) -> tuple[str, bytes]:
    """One line of a run's files as Anthropic writes it."""
    entry = json.loads(raw)
    response, error = entry["response"], entry["error"]
    if error is not None:
        result: dict[str, Any] = {"type": "expired"}
    elif response["status_code"] < 400:
        result = {"type": "succeeded", "message": response["body"]}
    else:
        result = {"type": "errored", "error": response["body"]}
    return entry["custom_id"], _line(entry["custom_id"], result)


def _left(batch: Batch) -> dict[str, Any]:
    """The result of a request that was never answered."""
    if batch.status == "cancelled":
        return {"type": "canceled"}
    told = (batch.shown.get("errors") or {}).get("data") or [{"message": "the batch has failed"}]
    return {"type": "errored", "error": anthropic_error_body(told[0]["message"], 500)}


def _line(custom_id: str, result: dict[str, Any]) -> bytes:
    return json.dumps({"custom_id": custom_id, "result": result}).encode() + b"\n"
