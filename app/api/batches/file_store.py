"""Files that tenants have uploaded, and those that batches write: a header with what OpenAI says of a file, and chunks.

A file that is being written has an owner, and nobody sees it. One whose writer died is forgotten when its first expiry
comes.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from typing import Any, Literal

from pydantic import Field
from starlette.datastructures import UploadFile

from app.api.http.strict_models import StrictModel
from app.api.store.entries import NEW, Birth, Lease, Seen, StoreConflictError, Stored
from app.api.store.tenant_store import TenantStore
from app.errors import InvalidRequestError

CHUNK_BYTES = 1 << 20
MIN_EXPIRES_S, MAX_EXPIRES_S = 3600, 30 * 86400
MAX_FILENAME_CHARS = 255
PURPOSE = "batch"  # of all files that clients may bring
EXPIRES_S = 30 * 86400  # unless the client says otherwise, as at OpenAI
UNFINISHED_S = 8 * 86400  # longer than the longest completion window


class ExpiresAfter(StrictModel):
    """When a file is forgotten."""

    anchor: Literal["created_at"]
    seconds: int = Field(ge=MIN_EXPIRES_S, le=MAX_EXPIRES_S)


class FileNotFoundHereError(InvalidRequestError):
    """No file is kept under this id for this tenant."""

    status = 404
    code = "file_not_found"


class FileStore:
    """The files of all tenants."""

    def __init__(self, store: TenantStore) -> None:
        self.entries = store

    async def create(self, tenant: str, filename: str, purpose: str, owner: str, lease_s: float) -> str:
        """Begin a file that `owner` writes; its id. StorageFullError where there is no room for one more."""
        file_id = f"file-{uuid.uuid4().hex}"
        await self.entries.put(
            tenant,
            file_id,
            json.dumps(_new(file_id, filename, purpose)).encode(),
            seen=NEW,
            lease=Lease(owner, lease_s),
            expires_s=UNFINISHED_S,
            born=Birth(label=purpose),
        )
        return file_id

    async def write(self, tenant: str, key: str, upload: UploadFile, owner: str) -> None:
        """Add what a client uploads to an entry of `owner`."""
        while chunk := await upload.read(CHUNK_BYTES):
            await self.entries.append(tenant, key, [chunk], owner)

    async def join(
        self, tenant: str, described: dict[str, Any], parts: Sequence[str], owner: str, expires_s: int | None
    ) -> dict[str, Any]:
        """Make a file of parts, entries of `owner`, which are then gone; what is said of it. `described`: what is
        known of it already."""
        expires_s = expires_s or EXPIRES_S
        file = _new(described["id"], described["filename"], described["purpose"])
        file |= {"bytes": described["bytes"], "expires_at": file["created_at"] + expires_s}
        options = {"expires_s": float(expires_s), "born": Birth(label=file["purpose"])}
        await self.entries.join(tenant, file["id"], json.dumps(file).encode(), parts, owner, **options)
        return file

    async def finish(self, tenant: str, file_id: str, expires_s: int | None = None) -> dict[str, Any]:
        """Show a file that has been written whole; what is said of it."""
        stored = await self.entries.get(tenant, file_id)
        if stored is None:
            raise _not_found(file_id)
        described: dict[str, Any] = json.loads(stored.header)
        expires_s = expires_s or EXPIRES_S
        described |= {"bytes": stored.num_bytes - len(stored.header)}
        described |= {"expires_at": described["created_at"] + expires_s}
        header = json.dumps(described).encode()
        await self.entries.put(tenant, file_id, header, seen=Seen(stored.version), expires_s=float(expires_s))
        return described

    async def find(self, tenant: str, file_id: str) -> dict[str, Any]:
        """The description of a file; FileNotFoundHereError where there is none."""
        stored = await self.entries.get(tenant, file_id)
        if stored is None or stored.owner:
            raise _not_found(file_id)
        return dict(json.loads(stored.header))

    async def page(
        self, tenant: str, after: str | None, limit: int, newest_first: bool, purpose: str
    ) -> tuple[list[dict[str, Any]], bool]:
        """Files in the order of their making, and whether there are more."""
        try:
            found = await self.entries.page(tenant, after, limit + 1, newest_first, label=purpose, only_finished=True)
        except StoreConflictError:
            raise InvalidRequestError(f"there is no file {after!r}", param="after") from None
        described = [json.loads(stored.header) for stored in found[:limit]]
        return described, len(found) > limit

    async def content(self, tenant: str, file_id: str, start: int = 0) -> AsyncIterator[bytes]:
        """The chunks of a file from number `start`; ends early when it is deleted meanwhile."""
        while chunks := await self.entries.read(tenant, file_id, start):
            start += len(chunks)
            for chunk in chunks:
                yield chunk

    async def lines(self, tenant: str, file_id: str, max_bytes: int) -> AsyncIterator[bytes]:
        """The lines of a file, without their ends. InvalidRequestError for one of more than `max_bytes`."""
        rest: list[bytes] = []  # of a line, joined once
        num_bytes = 0
        async for chunk in self.content(tenant, file_id):
            for i, piece in enumerate(chunk.split(b"\n")):
                if i:
                    yield b"".join(rest)
                    rest, num_bytes = [], 0
                rest.append(piece)
                num_bytes += len(piece)
                if num_bytes > max_bytes:
                    raise InvalidRequestError(f"a line has more than {max_bytes} bytes")
        if num_bytes:
            yield b"".join(rest)

    async def delete(self, tenant: str, file_id: str) -> None:
        """Delete a file; FileNotFoundHereError where there is none."""
        await self.find(tenant, file_id)
        await self.entries.delete(tenant, file_id)

    async def discard(self, tenant: str, file_id: str) -> None:
        """Delete a file whose upload did not finish."""
        await self.entries.delete(tenant, file_id)

    async def take(self, tenant: str, file_id: str, owner: str, lease_s: float) -> Stored | None:
        """Go on with a file whose writer died; None when it is gone."""
        return await self.entries.take(tenant, file_id, owner, lease_s)


def _new(file_id: str, filename: str, purpose: str) -> dict[str, Any]:
    """Describes a file of which nothing has come."""
    described = {"id": file_id, "object": "file", "bytes": 0, "created_at": int(time.time())}
    return described | {"filename": filename, "purpose": purpose, "status": "processed", "expires_at": None}


def _not_found(file_id: str) -> FileNotFoundHereError:
    return FileNotFoundHereError(f"there is no file {file_id[:256]!r}", param="file_id")
