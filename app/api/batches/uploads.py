"""Checks an upload before its body is read: who sends it, and whether there is room for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager

from fastapi import Request
from python_multipart.exceptions import FormParserError
from starlette.datastructures import FormData, UploadFile

from app.api.batches.file_store import FileStore
from app.api.http.errors import BodyTooLargeError
from app.api.http.origin import check_origin
from app.config.ingress import IngressConfig
from app.config.limits import RequestLimits
from app.errors import InvalidRequestError, OverloadedError

FORM_BYTES = 64 << 10  # a form's size without its file


class Uploads:
    """The uploads under way in an ingress replica, which are written to its disk first. They may be as large together
    as the files that are kept, in all and of one tenant; one alone may always come."""

    def __init__(self, files: FileStore, limits: RequestLimits, ingress: IngressConfig) -> None:
        self._files = files
        self._ingress = ingress
        self._max_bytes = limits.max_file_bytes + FORM_BYTES
        self._held: Counter[str] = Counter()  # bytes of each tenant

    @asynccontextmanager
    async def form(self, request: Request, fields: Collection[str]) -> AsyncIterator[FormData]:
        """The form that a request brings, of these fields; InvalidRequestError where it has others or is none."""
        if not request.headers.get("content-type", "").startswith("multipart/form-data"):
            raise InvalidRequestError("expected a form: multipart/form-data")
        try:
            form_limits = {"max_files": 1, "max_fields": len(fields), "max_part_size": 1024}
            async with self._admit(request), request.form(**form_limits) as form:
                if unknown := sorted(set(form) - set(fields)):
                    raise InvalidRequestError(f"unknown field {unknown[0][:256]!r}", param=unknown[0][:256])
                yield form
        except FormParserError as error:  # Starlette lets it pass
            raise InvalidRequestError(f"the form cannot be read: {error}") from error

    @asynccontextmanager
    async def _admit(self, request: Request) -> AsyncIterator[None]:
        """Hold a place while the upload is read and kept. ForeignOriginError, StorageFullError, OverloadedError."""
        check_origin(request, self._ingress.cors_origins)
        tenant, length = request.state.tenant, request.headers.get("content-length", "")
        num_bytes = int(length[:20]) if length.isdigit() else self._max_bytes
        if length:
            await self._files.entries.check_room(tenant, max(0, num_bytes - FORM_BYTES))
        self._check(tenant, num_bytes)
        self._held[tenant] += num_bytes
        try:
            yield
        finally:
            self._held[tenant] -= num_bytes
            if not self._held[tenant]:
                del self._held[tenant]

    def _check(self, tenant: str, num_bytes: int) -> None:
        held, own = self._held.total(), self._held[tenant]
        most, most_own = self._ingress.max_file_store_bytes, self._ingress.max_tenant_file_store_bytes
        if (held and held + num_bytes > most) or (own and own + num_bytes > most_own):
            raise OverloadedError(f"uploads under way have {held} bytes together, {own} of them yours; try later")


def uploaded(form: FormData, name: str, max_bytes: int) -> UploadFile:
    """The file in a form; InvalidRequestError where there is none, or too large a one."""
    upload = form.get(name)
    if not isinstance(upload, UploadFile):
        raise InvalidRequestError(f"{name!r} is required, as a file", param=name)
    if not upload.size:
        raise InvalidRequestError("the file is empty", param=name)
    if upload.size > max_bytes:
        raise BodyTooLargeError(f"the file exceeds the limit of {max_bytes} bytes", param=name)
    return upload
