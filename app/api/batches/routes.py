"""/v1/batches: create, retrieve, list, cancel."""

from __future__ import annotations

from fastapi import APIRouter, Request

from app.api.batches.batch import Batch, BatchBody
from app.api.batches.file_store import FileNotFoundHereError, FileStore
from app.api.batches.runner import LABEL, BatchRunner
from app.api.http.body import describe_body, read_body
from app.api.http.json_response import JSONResponse
from app.api.http.query import int_param, list_page, text_param
from app.api.store.entries import StoreConflictError
from app.api.store.tenant_store import TenantStore
from app.errors import InvalidRequestError


def batch_routes(runner: BatchRunner, files: FileStore, batches: TenantStore) -> APIRouter:
    """The endpoints of batches."""
    router = APIRouter(tags=["openai"])

    @router.post("/v1/batches", openapi_extra=describe_body(BatchBody))
    async def create_batch(request: Request) -> JSONResponse:
        """Answer all requests of a file, while others wait for nothing; the results are a file again."""
        body = await read_body(request, BatchBody)
        try:
            found = await files.find(request.state.tenant, body.input_file_id)
        except FileNotFoundHereError as error:
            raise InvalidRequestError(error.message, param="input_file_id") from None
        if found["purpose"] != "batch":
            raise InvalidRequestError("the file's purpose is not batch", param="input_file_id")
        batch = Batch.new(body)
        shown = batch.as_json()
        await runner.begin(request.state.tenant, batch)
        return JSONResponse(shown)

    @router.get("/v1/batches")
    async def list_batches(request: Request) -> JSONResponse:
        """The batches of the caller, the newest first, in pages."""
        limit, after = int_param(request, "limit", 20, 1, 100), text_param(request, "after")
        try:
            found = await batches.page(request.state.tenant, after, limit + 1, newest_first=True, label=LABEL)
        except StoreConflictError:
            raise InvalidRequestError(f"there is no batch {after!r}", param="after") from None
        page = [Batch.load(stored.header).as_json() for stored in found[:limit]]
        return JSONResponse(list_page(page, len(found) > limit))

    @router.get("/v1/batches/{batch_id}")
    async def retrieve_batch(request: Request, batch_id: str) -> JSONResponse:
        """The status of a batch."""
        runner.start()
        batch, _ = await runner.find(request.state.tenant, batch_id)
        return JSONResponse(batch.as_json())

    @router.post("/v1/batches/{batch_id}/cancel")
    async def cancel_batch(request: Request, batch_id: str) -> JSONResponse:
        """End a batch; what is done stays in its files."""
        runner.start()
        return JSONResponse((await runner.cancel(request.state.tenant, batch_id)).as_json())

    return router
