"""An entry of a store as it lies in memory, and those of one tenant."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from app.api.store.entries import Seen, StoreConflictError
from app.api.store.order import Ages


@dataclass(slots=True)
class KeptEntry:
    """One entry: its header, its chunks, and who works on it until when."""

    header: bytes
    created: int  # counts up
    chunks: list[bytes] = field(default_factory=list)
    version: int = 0
    num_bytes: int = 0
    previous: str | None = None
    label: str = ""
    owner: str = ""
    lease_until: float = 0.0
    expires_at: float | None = None

    def is_held(self, now: float) -> bool:
        """True if its owner is known to work on it."""
        return bool(self.owner) and now < self.lease_until


@dataclass(slots=True)
class TenantEntries:
    """The entries of one tenant, and the orders in which they are asked for."""

    entries: OrderedDict[str, KeptEntry] = field(default_factory=OrderedDict)  # the longest unused first
    num_bytes: int = 0
    owned: dict[str, KeptEntry] = field(default_factory=dict)
    ages: dict[str, Ages] = field(default_factory=dict)  # by label; "" has all


def check_seen(key: str, entry: KeptEntry | None, seen: Seen | None) -> None:
    """StoreConflictError where an entry is no longer as it was seen."""
    if seen is None:
        return
    if seen.version != (entry.version if entry is not None else 0):
        raise StoreConflictError(f"{key} was changed meanwhile")
    if seen.num_chunks is not None and seen.num_chunks != (len(entry.chunks) if entry is not None else 0):
        raise StoreConflictError(f"{key} has grown meanwhile")


def is_repeated(entry: KeptEntry, header: bytes, append: Sequence[bytes], seen: Seen | None, owner: str) -> bool:
    """True if the last change of an entry was the put of just this after `seen`."""
    if seen is None or (entry.version, entry.header, entry.owner) != (seen.version + 1, header, owner):
        return False
    return entry.chunks[len(entry.chunks) - len(append) :] == list(append)
