"""Checks an upload before its body is read: who sends it, and whether there is room for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager

from fastapi import Request
from starlette.datastructures import FormData

from app.api.batches.file_store import FileStore
from app.api.http.form import FORM_BYTES, read_form
from app.api.http.origin import check_origin
from app.config.ingress import IngressConfig
from app.config.limits import RequestLimits
from app.errors import InvalidRequestError, OverloadedError


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
        async with self._admit(request), read_form(request, len(fields)) as form:
            if unknown := sorted(set(form) - set(fields)):
                raise InvalidRequestError(f"unknown field {unknown[0][:256]!r}", param=unknown[0][:256])
            yield form

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
