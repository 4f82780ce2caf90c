"""Decides where a request belongs: what bodies say of it, and what the server makes of that."""

from __future__ import annotations

import hashlib
from typing import Any, Literal

from pydantic import Field
from starlette.requests import Request

from app.api.http.service_terms import ServiceTerms
from app.api.http.strict_models import FirstFault
from app.records.request import Placement, Priority


class PlacementFields(FirstFault):
    """Fields of every body that makes requests for an engine."""

    priority: Priority = Field(
        0, description="Lower goes first among the tenant's own, where the engine schedules by priority."
    )
    cache_salt: str | None = Field(None, min_length=1, description="Only requests of equal salt share prefix blocks.")
    service_tier: Literal["auto", "default", "flex", "scale", "priority", "fast"] | None = Field(
        None,
        description="Whom the request goes before where work queues: `priority` and `fast` are the class interactive, "
        "`flex` is bulk, `default` and `scale` default, `auto` the tenant's own.",
    )

    def placement(self, request: Request, session: str = "", is_stream: bool = False) -> Placement:
        """That of the body's requests. The server knows the tenant by its API key; headers bring deadline and retries.

        InvalidRequestError names a header that is none, DeadlineError says that there is no time left.
        """
        tenant: str = request.state.tenant
        terms: ServiceTerms = request.app.state.service_terms
        return Placement(
            self.priority,
            cache_root(tenant, self.cache_salt),
            session,
            tenant,
            terms.service_class(request, self.service_tier),
            terms.num_retries(request),
            terms.deadline(request, is_stream),
        )

    def placement_fields(self) -> dict[str, Any]:
        """The fields as they were sent, for a body in another dialect."""
        return {name: getattr(self, name) for name in PlacementFields.model_fields}


def cache_root(tenant: str, cache_salt: str | None) -> bytes:
    """Returns what a request's prefix blocks are hashed with, so that only equal tenants with equal salt share them
    (I5).
    """
    if not tenant and cache_salt is None:
        return b""
    names = f"{len(tenant)}:{tenant}{cache_salt or ''}"
    return hashlib.blake2b(names.encode(), digest_size=16).digest()
