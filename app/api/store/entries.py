"""Describes the entries of a store, what bounds it, and how it refuses."""

from __future__ import annotations

from dataclasses import dataclass

from app.errors import EngineDeadError, InvalidRequestError, MantaError


class StoreConflictError(MantaError):
    """The entry is gone, was changed meanwhile, or belongs to another owner."""


class StoreUnavailableError(EngineDeadError):
    """The store cannot be reached at the moment; everything that needs none of it goes on."""

    code = "store_unavailable"

    def __init__(self, message: str = "", *, param: str | None = None) -> None:
        default = (
            "the store of responses, files, batches and answers under an Idempotency-Key does not answer at the moment;"
            " send the request again later"
        )
        super().__init__(message or default, param=param)


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
    """Describes an entry of a store. `is_lost`: its owner's lease has run out."""

    key: str
    header: bytes
    version: int
    num_chunks: int
    num_bytes: int
    previous: str | None = None
    owner: str = ""
    is_lost: bool = False


@dataclass(slots=True, frozen=True)
class Seen:
    """An entry as its writer knows it. `version` 0: there is none; `num_chunks` None: it may have grown."""

    version: int
    num_chunks: int | None = None


NEW = Seen(0)


@dataclass(slots=True, frozen=True)
class Lease:
    """Names who works on an entry, and for how long it is known without a word from there."""

    owner: str
    seconds: float


NO_LEASE = Lease("", 0.0)


@dataclass(slots=True, frozen=True)
class Birth:
    """Holds what is said of an entry once, when it is made."""

    previous: str | None = None  # the entry that it continues
    label: str = ""
    max_owned: int | None = None  # entries of the tenant that may be worked on, for it to be made


PLAIN = Birth()


@dataclass(slots=True, frozen=True)
class Tail:
    """Chunks of an entry, and whether somebody works on it still. `is_lost`: its owner's lease has run out."""

    chunks: list[bytes]
    is_owned: bool
    is_lost: bool
