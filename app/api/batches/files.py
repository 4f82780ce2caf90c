"""/v1/files: upload, list, retrieve, content, delete. Only files for batches are kept."""

from __future__ import annotations

import uuid
from typing import Any

from fastapi import APIRouter, Request
from python_multipart.exceptions import FormParserError
from starlette.datastructures import FormData, UploadFile
from starlette.responses import JSONResponse, StreamingResponse

from app.api.batches.file_store import CHUNK_BYTES, FileStore
from app.api.batches.uploads import Uploads
from app.api.errors import BodyTooLargeError
from app.api.query import choice_param, int_param, list_page, text_param
from app.config import IngressConfig, RequestLimits
from app.errors import InvalidRequestError, UnsupportedError

UPLOAD_LEASE_S = 600.0
MIN_EXPIRES_S, MAX_EXPIRES_S = 3600, 30 * 86400
MAX_FILENAME_CHARS = 255
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


def file_routes(files: FileStore, limits: RequestLimits, ingress: IngressConfig) -> APIRouter:
    """The endpoints of files."""
    router = APIRouter(tags=["openai"])
    uploads = Uploads(files, limits, ingress)

    @router.post("/v1/files", openapi_extra={"requestBody": _BODY})
    async def upload_file(request: Request) -> JSONResponse:
        """Keep a file of requests for a batch: multipart with `purpose=batch`, `file`, perhaps `expires_after`."""
        if not request.headers.get("content-type", "").startswith("multipart/form-data"):
            raise InvalidRequestError("expected a form: multipart/form-data")
        try:
            form_limits = {"max_files": 1, "max_fields": len(_FIELDS), "max_part_size": 1024}
            async with uploads.admit(request), request.form(**form_limits) as form:
                return JSONResponse(await _keep(files, limits, request.state.tenant, form))
        except FormParserError as error:  # Starlette lets it pass
            raise InvalidRequestError(f"the form cannot be read: {error}") from error

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
    upload, expires_s = _checked(form)
    if (upload.size or 0) > limits.max_file_bytes:
        raise BodyTooLargeError(f"the file exceeds the limit of {limits.max_file_bytes} bytes", param="file")
    owner = uuid.uuid4().hex
    name = (upload.filename or "upload")[:MAX_FILENAME_CHARS]
    file_id = await files.create(tenant, name, "batch", owner, UPLOAD_LEASE_S)
    try:
        while chunk := await upload.read(CHUNK_BYTES):
            await files.entries.append(tenant, file_id, [chunk], owner)
        return await files.finish(tenant, file_id, expires_s)
    except BaseException:
        await files.discard(tenant, file_id)
        raise


def _checked(form: FormData) -> tuple[UploadFile, int | None]:
    """The file of a form, and after how many seconds it expires. InvalidRequestError names the field at fault."""
    unknown = sorted(set(form) - _FIELDS)
    if unknown:
        raise InvalidRequestError(f"unknown field {unknown[0][:256]!r}", param=unknown[0][:256])
    upload, purpose = form.get("file"), form.get("purpose")
    if not isinstance(upload, UploadFile):
        raise InvalidRequestError("'file' is required, as a file", param="file")
    if purpose != "batch":
        raise UnsupportedError("only files for batches are kept: purpose=batch", param="purpose")
    if not upload.size:
        raise InvalidRequestError("the file is empty", param="file")
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
