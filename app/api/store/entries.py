"""What a store says of its entries, what bounds it, and how it refuses."""

from __future__ import annotations

from dataclasses import dataclass

from app.errors import InvalidRequestError, MantaError


class StoreConflictError(MantaError):
    """The entry is gone, was changed meanwhile, or belongs to another owner."""


class StorageFullError(InvalidRequestError):
    """No room is left for this tenant, or for anybody."""

    status = 413
    code = "storage_full"


@dataclass(slots=True, frozen=True)
class StoreLimits:
    """Most entries and bytes of one kind, in all and of one tenant. `keeps_lost`: an entry whose owner has died waits
    for another one."""

    max_entries: int
    max_bytes: int
    max_tenant_entries: int
    max_tenant_bytes: int
    evicts: bool = False
    keeps_lost: bool = False


@dataclass(slots=True, frozen=True)
class Stored:
    """What a store says of an entry. `is_lost`: its owner's lease has run out."""

    key: str
    header: bytes
    version: int
    num_chunks: int
    num_bytes: int
    previous: str | None = None
    owner: str = ""
    is_lost: bool = False


@dataclass(slots=True, frozen=True)
class Tail:
    """Chunks of an entry, and whether somebody works on it still. `is_lost`: its owner's lease has run out."""

    chunks: list[bytes]
    is_owned: bool
    is_lost: bool
