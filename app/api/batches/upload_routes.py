"""/v1/uploads: create, parts, complete, cancel. What comes of it is a file of /v1/files."""

from __future__ import annotations

from fastapi import APIRouter, Request

from app.api.batches.upload_store import CompleteBody, UploadBody, UploadStore
from app.api.batches.uploads import Uploads
from app.api.http.body import describe_body, read_body
from app.api.http.form import uploaded
from app.api.http.json_response import JSONResponse
from app.api.http.work_pool import work_of

PARTS = "/v1/uploads/{upload_id}/parts"
MAX_PART_BYTES = 64 << 20  # as at OpenAI
_BODY = {
    "content": {
        "multipart/form-data": {
            "schema": {
                "type": "object",
                "required": ["data"],
                "properties": {"data": {"type": "string", "format": "binary"}},
            }
        }
    }
}


def upload_routes(store: UploadStore, uploads: Uploads) -> APIRouter:
    """The endpoints of uploads in parts."""
    router = APIRouter(tags=["openai"])

    @router.post("/v1/uploads", openapi_extra=describe_body(UploadBody))
    async def create_upload(request: Request) -> JSONResponse:
        """Begin a file that comes in parts, within an hour."""
        body = await read_body(request, UploadBody)
        return JSONResponse(await store.begin(request.state.tenant, body))

    @router.post(PARTS, openapi_extra={"requestBody": _BODY})
    async def add_part(request: Request, upload_id: str) -> JSONResponse:
        """Add a part of at most 64 MiB: multipart with `data`."""
        async with uploads.form(request, {"data"}) as form:
            data = uploaded(form, "data", MAX_PART_BYTES)
            return JSONResponse(await store.add(request.state.tenant, upload_id, data))

    @router.post("/v1/uploads/{upload_id}/complete", openapi_extra=describe_body(CompleteBody))
    async def complete_upload(request: Request, upload_id: str) -> JSONResponse:
        """Make the file of the parts."""
        body = await read_body(request, CompleteBody)
        return JSONResponse(await store.complete(work_of(request), request.state.tenant, upload_id, body))

    @router.post("/v1/uploads/{upload_id}/cancel")
    async def cancel_upload(request: Request, upload_id: str) -> JSONResponse:
        """End an upload without a file."""
        return JSONResponse(await store.cancel(request.state.tenant, upload_id))

    return router
