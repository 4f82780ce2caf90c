"""What all configuration classes are."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Frozen(BaseModel):
    """Immutable, and closed to unknown fields."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())
