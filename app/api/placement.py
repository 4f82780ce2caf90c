"""Where a request belongs: what bodies say of it, and what the server makes of that."""

from __future__ import annotations

import hashlib
from typing import Any

from pydantic import Field

from app.api.strict_models import FirstFault
from app.engine.request import Placement, Priority


class PlacementFields(FirstFault):
    """Fields of every body that makes requests for an engine."""

    priority: Priority = Field(0, description="Lower goes first, where the engine schedules by priority.")
    cache_salt: str | None = Field(None, min_length=1, description="Only requests of equal salt share prefix blocks.")

    def placement(self, tenant: str, session: str = "") -> Placement:
        """That of the body's requests; the server knows the tenant by its API key."""
        return Placement(self.priority, cache_root(tenant, self.cache_salt), session, tenant)

    def placement_fields(self) -> dict[str, Any]:
        """The fields as they were sent, for a body in another dialect."""
        return {name: getattr(self, name) for name in PlacementFields.model_fields}


def cache_root(tenant: str, cache_salt: str | None) -> bytes:
    """What a request's prefix blocks are hashed with, so that only equal tenants with equal salt share them (I5)."""
    if not tenant and cache_salt is None:
        return b""
    names = f"{len(tenant)}:{tenant}{cache_salt or ''}"
    return hashlib.blake2b(names.encode(), digest_size=16).digest()
