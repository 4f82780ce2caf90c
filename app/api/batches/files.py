"""/v1/files: upload, list, retrieve, content, delete. Only files for batches are kept."""

from __future__ import annotations

import uuid
from typing import Any

from fastapi import APIRouter, Request
from starlette.datastructures import FormData, UploadFile
from starlette.responses import StreamingResponse

from app.api.batches.file_store import MAX_EXPIRES_S, MAX_FILENAME_CHARS, MIN_EXPIRES_S, PURPOSE, FileStore
from app.api.batches.uploads import Uploads
from app.api.http.form import uploaded
from app.api.http.json_response import JSONResponse
from app.api.http.query import choice_param, int_param, list_page, text_param
from app.config.limits import RequestLimits
from app.errors import InvalidRequestError, UnsupportedError

UPLOAD_LEASE_S = 600.0
_FIELDS = frozenset({"file", "purpose", "expires_after[anchor]", "expires_after[seconds]"})
_BODY = {
    "content": {
        "multipart/form-data": {
            "schema": {
                "type": "object",
                "required": ["file", "purpose"],
                "properties": {
                    "file": {"type": "string", "format": "binary"},
                    "purpose": {"const": "batch"},
                    "expires_after[anchor]": {"const": "created_at"},
                    "expires_after[seconds]": {"type": "integer", "minimum": MIN_EXPIRES_S, "maximum": MAX_EXPIRES_S},
                },
            }
        }
    }
}


def file_routes(files: FileStore, limits: RequestLimits, uploads: Uploads) -> APIRouter:
    """The endpoints of files."""
    router = APIRouter(tags=["openai"])

    @router.post("/v1/files", openapi_extra={"requestBody": _BODY})
    async def upload_file(request: Request) -> JSONResponse:
        """Keep a file of requests for a batch: multipart with `purpose=batch`, `file`, perhaps `expires_after`."""
        async with uploads.form(request, _FIELDS) as form:
            return JSONResponse(await _keep(files, limits, request.state.tenant, form))

    @router.get("/v1/files")
    async def list_files(request: Request) -> JSONResponse:
        """The files of the caller, in pages, the newest first unless `order` is asc."""
        is_newest_first = choice_param(request, "order", ("desc", "asc")) == "desc"
        limit, after = int_param(request, "limit", 10_000, 1, 10_000), text_param(request, "after")
        purpose = text_param(request, "purpose") or ""
        found, has_more = await files.page(request.state.tenant, after, limit, is_newest_first, purpose)
        return JSONResponse(list_page(found, has_more))

    @router.get("/v1/files/{file_id}")
    async def retrieve_file(request: Request, file_id: str) -> JSONResponse:
        """Describe a file."""
        return JSONResponse(await files.find(request.state.tenant, file_id))

    @router.get("/v1/files/{file_id}/content")
    async def file_content(request: Request, file_id: str) -> StreamingResponse:
        """The content of a file."""
        found = await files.find(request.state.tenant, file_id)
        headers = {"Content-Length": str(found["bytes"])}
        content = files.content(request.state.tenant, file_id)
        return StreamingResponse(content, headers=headers, media_type="application/octet-stream")

    @router.delete("/v1/files/{file_id}")
    async def delete_file(request: Request, file_id: str) -> JSONResponse:
        """Delete a file."""
        await files.delete(request.state.tenant, file_id)
        return JSONResponse({"id": file_id, "object": "file", "deleted": True})

    return router


async def _keep(files: FileStore, limits: RequestLimits, tenant: str, form: FormData) -> dict[str, Any]:
    """Keep the uploaded file, whole or not at all."""
    upload, expires_s = _checked(form, limits)
    owner = uuid.uuid4().hex
    name = (upload.filename or "upload")[:MAX_FILENAME_CHARS]
    file_id = await files.create(tenant, name, PURPOSE, owner, UPLOAD_LEASE_S)
    try:
        await files.write(tenant, file_id, upload, owner)
        return await files.finish(tenant, file_id, expires_s)
    except BaseException:
        await files.discard(tenant, file_id)
        raise


def _checked(form: FormData, limits: RequestLimits) -> tuple[UploadFile, int | None]:
    """The file of a form, and after how many seconds it expires. InvalidRequestError names the field at fault."""
    upload = uploaded(form, "file", limits.max_file_bytes)
    if form.get("purpose") != PURPOSE:
        raise UnsupportedError(f"only files for batches are kept: purpose={PURPOSE}", param="purpose")
    anchor, seconds = form.get("expires_after[anchor]"), form.get("expires_after[seconds]")
    if anchor is None and seconds is None:
        return upload, None
    if anchor != "created_at":
        raise InvalidRequestError("must be created_at", param="expires_after.anchor")
    if not isinstance(seconds, str) or not (seconds.isascii() and seconds.isdigit() and len(seconds) < 9):
        raise InvalidRequestError("expected a whole number", param="expires_after.seconds")
    if not MIN_EXPIRES_S <= int(seconds) <= MAX_EXPIRES_S:
        raise InvalidRequestError(f"from {MIN_EXPIRES_S} to {MAX_EXPIRES_S}", param="expires_after.seconds")
    return upload, int(seconds)
