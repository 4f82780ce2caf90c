"""Uploads in parts: a file comes in pieces, and is made of them at the end, as OpenAI's /v1/uploads has it.

An upload and its parts are entries of the store of files, under its bounds. Their owner is the upload, so nobody takes
them for files; a part's label is its upload, which finds its parts by that.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
import uuid
from collections.abc import Sequence
from typing import Any

from pydantic import Field
from starlette.datastructures import UploadFile

from app.api.batches.file_store import MAX_FILENAME_CHARS, PURPOSE, ExpiresAfter, FileNotFoundHereError, FileStore
from app.api.http.errors import BodyTooLargeError
from app.api.http.strict_models import StrictModel
from app.api.http.work_pool import RequestWork
from app.api.store.entries import NEW, Birth, Lease, Seen, StoreConflictError, Stored
from app.bounds import Count, Items
from app.config.limits import RequestLimits
from app.errors import InvalidRequestError, UnsupportedError

PREFIX = "upload_"
UPLOAD_S = 3600  # as at OpenAI
ENDED_S = 600.0  # how long one that has ended is known
MAX_PARTS = 1 << 16
HASH_S_PER_BYTE = 2e-9
NO_HEADER = b"{}"  # of a part


class UploadBody(StrictModel):
    """Body of POST /v1/uploads."""

    bytes: Count = Field(ge=1, description="Size of the whole file.")
    filename: str = Field(min_length=1, max_length=MAX_FILENAME_CHARS, description="Name of the file.")
    mime_type: str = Field(
        min_length=1, max_length=255, description="Read by nobody here: files of batches are lines of JSON."
    )
    purpose: str = Field(min_length=1, max_length=64, description="Only batch.")
    expires_after: ExpiresAfter | None = Field(
        None, description="When the file is forgotten; after 30 days when not given."
    )


class CompleteBody(StrictModel):
    """Body of POST /v1/uploads/{upload_id}/complete."""

    part_ids: Items[str] = Field(min_length=1, max_length=MAX_PARTS, description="The parts, in the file's order.")
    md5: str | None = Field(
        None, pattern=r"^[0-9a-fA-F]{32}$", description="Checksum of the whole file; another one is refused."
    )


class UploadNotFoundError(InvalidRequestError):
    """No upload is known under this id for this tenant."""

    status = 404
    code = "upload_not_found"


class UploadStore:
    """The uploads of all tenants."""

    def __init__(self, files: FileStore, limits: RequestLimits) -> None:
        self._files = files
        self._entries = files.entries
        self._max_bytes = limits.max_file_bytes

    async def begin(self, tenant: str, body: UploadBody) -> dict[str, Any]:
        """A new upload. StorageFullError where its file would find no room."""
        if body.purpose != PURPOSE:
            raise UnsupportedError(f"only files for batches are kept: purpose={PURPOSE}", param="purpose")
        if body.bytes > self._max_bytes:
            raise BodyTooLargeError(f"a file may have {self._max_bytes} bytes", param="bytes")
        await self._entries.check_room(tenant, body.bytes)
        upload_id, now = f"{PREFIX}{uuid.uuid4().hex}", int(time.time())
        shown: dict[str, Any] = {"id": upload_id, "object": "upload", "bytes": body.bytes, "created_at": now}
        shown |= {"filename": body.filename, "purpose": body.purpose, "status": "pending"}
        shown |= {"expires_at": now + UPLOAD_S, "file": None}
        kept = {"shown": shown, "file_expires_s": body.expires_after.seconds if body.expires_after else None}
        await self._entries.put(
            tenant,
            upload_id,
            json.dumps(kept).encode(),
            seen=NEW,
            lease=Lease(upload_id, UPLOAD_S),
            expires_s=UPLOAD_S + ENDED_S,
            born=Birth(label=PREFIX),
        )
        return shown

    async def add(self, tenant: str, upload_id: str, data: UploadFile) -> dict[str, Any]:
        """Keep a part, whole or not at all."""
        shown = (await self._pending(tenant, upload_id))[1]["shown"]
        if (data.size or 0) > shown["bytes"]:
            raise InvalidRequestError(f"the whole file has {shown['bytes']} bytes", param="data")
        part_id, left_s = f"part_{uuid.uuid4().hex}", max(0.0, shown["expires_at"] - time.time())
        options = {"lease": Lease(upload_id, left_s), "expires_s": left_s, "born": Birth(label=upload_id)}
        await self._entries.put(tenant, part_id, NO_HEADER, seen=NEW, **options)
        try:
            await self._files.write(tenant, part_id, data, upload_id)
            await self._pending(tenant, upload_id)  # it may have ended meanwhile, and left this part behind
        except StoreConflictError:  # the part is gone
            raise InvalidRequestError("the upload has ended meanwhile", param="upload_id") from None
        except BaseException:
            await self._files.discard(tenant, part_id)
            raise
        return {"id": part_id, "object": "upload.part", "created_at": int(time.time()), "upload_id": upload_id}

    async def complete(self, work: RequestWork, tenant: str, upload_id: str, body: CompleteBody) -> dict[str, Any]:
        """Make the file of the parts; the upload with it. One that is complete is told as it is."""
        stored, kept = await self._find(tenant, upload_id)
        shown: dict[str, Any] = kept["shown"]
        if shown["status"] == "completed":
            return shown
        _check_pending(shown)
        file_id = f"file-{upload_id.removeprefix(PREFIX)}"
        try:
            file = await self._files.find(tenant, file_id)  # who completed it was lost before it could say so
        except FileNotFoundHereError:
            await self._check_parts(work, tenant, shown, body)
            described = shown | {"id": file_id}
            try:
                file = await self._files.join(tenant, described, body.part_ids, upload_id, kept["file_expires_s"])
            except StoreConflictError:
                raise InvalidRequestError("the upload has ended meanwhile", param="upload_id") from None
        kept["shown"] = shown | {"status": "completed", "file": file}
        if not await self._end(tenant, stored, kept):
            shown = (await self._find(tenant, upload_id))[1]["shown"]
            if shown["status"] != "completed":
                await self._files.discard(tenant, file_id)
                _check_pending(shown)
            return shown
        await self._forget_parts(tenant, upload_id)
        return dict(kept["shown"])

    async def cancel(self, tenant: str, upload_id: str) -> dict[str, Any]:
        """End an upload without a file; its parts are forgotten."""
        stored, kept = await self._pending(tenant, upload_id)
        kept["shown"]["status"] = "cancelled"
        if not await self._end(tenant, stored, kept):
            raise InvalidRequestError("the upload has ended meanwhile", param="upload_id")
        await self._forget_parts(tenant, upload_id)
        return dict(kept["shown"])

    async def _check_parts(self, work: RequestWork, tenant: str, shown: dict[str, Any], body: CompleteBody) -> None:
        """InvalidRequestError where the parts are not those of this upload, or not the file that was announced."""
        sizes = {part.key: part.num_bytes - len(part.header) for part in await self._parts(tenant, shown["id"])}
        for i, part_id in enumerate(body.part_ids):
            if part_id not in sizes:
                raise InvalidRequestError(f"the upload has no part {part_id[:256]!r}", param=f"part_ids.{i}")
        if len(set(body.part_ids)) < len(body.part_ids):
            raise InvalidRequestError("a part is there twice", param="part_ids")
        num_bytes = sum(sizes[part_id] for part_id in body.part_ids)
        if num_bytes != shown["bytes"]:
            what = f"the parts have {num_bytes} bytes together; announced were {shown['bytes']}"
            raise InvalidRequestError(what, param="part_ids")
        if body.md5 is not None and (found := await self._md5(work, tenant, body.part_ids)) != body.md5.lower():
            raise InvalidRequestError(f"the file's checksum is {found}", param="md5")

    async def _md5(self, work: RequestWork, tenant: str, part_ids: Sequence[str]) -> str:
        digest = hashlib.md5(usedforsecurity=False)
        for part_id in part_ids:
            async for chunk in self._files.content(tenant, part_id):
                await work.run(HASH_S_PER_BYTE * len(chunk), digest.update, chunk)
        return digest.hexdigest()

    async def _parts(self, tenant: str, upload_id: str) -> list[Stored]:
        return await self._entries.page(tenant, None, MAX_PARTS, newest_first=False, label=upload_id)

    async def _forget_parts(self, tenant: str, upload_id: str) -> None:
        for part in await self._parts(tenant, upload_id):
            await self._entries.delete(tenant, part.key)

    async def _end(self, tenant: str, stored: Stored, kept: dict[str, Any]) -> bool:
        """Note how an upload has ended; False where it has ended otherwise meanwhile."""
        lease = Lease(stored.key, ENDED_S)
        with contextlib.suppress(StoreConflictError):
            header = json.dumps(kept).encode()
            await self._entries.put(
                tenant, stored.key, header, seen=Seen(stored.version), lease=lease, expires_s=ENDED_S
            )
            return True
        return False

    async def _pending(self, tenant: str, upload_id: str) -> tuple[Stored, dict[str, Any]]:
        found = await self._find(tenant, upload_id)
        _check_pending(found[1]["shown"])
        return found

    async def _find(self, tenant: str, upload_id: str) -> tuple[Stored, dict[str, Any]]:
        """An upload as it is stored, and what is known of it."""
        stored = await self._entries.get(tenant, upload_id) if upload_id.startswith(PREFIX) else None
        if stored is None:
            raise UploadNotFoundError(f"there is no upload {upload_id[:256]!r}", param="upload_id")
        kept: dict[str, Any] = json.loads(stored.header)
        shown = kept["shown"]
        if shown["status"] == "pending" and time.time() >= shown["expires_at"]:
            shown["status"] = "expired"
        return stored, kept


def _check_pending(shown: dict[str, Any]) -> None:
    if shown["status"] != "pending":
        raise InvalidRequestError(f"the upload is {shown['status']}", param="upload_id")
