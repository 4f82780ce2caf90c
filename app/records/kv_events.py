"""Tells the outside what the block pool has in its prefix cache: the feed of the router's block-hash index.

The engine's thread calls a KVEventSink; KVEventLog is the one that turns those calls into numbered batches. A batch
holds the net change since the batch before it, so applying it twice, or a removal of what is not there, does no harm.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Literal, Protocol

import msgspec

from app.records.block_hash import HASH_BYTES

KVTier = Literal["device", "host", "state"]
KVEventKind = Literal["stored", "removed"]
TIERS: tuple[KVTier, ...] = ("device", "host", "state")
# A replica whose layers keep states has one behind no tokens at all: that it says so tells that its hits need states.
EMPTY_PREFIX = bytes(HASH_BYTES)


class KVEventSink(Protocol):
    """Receives every change of the set of cached block hashes, in order, on the engine's thread: must be quick.

    The lists are handed over: the caller does not change them afterwards. A block that moves from one tier to the
    other is reported as removed from the one and as stored in the other; it may well be in both. "state" is no tier of
    blocks: it says that a state is kept behind a block, wherever that lies.
    """

    def report_stored(self, parent: bytes, hashes: list[bytes], tier: KVTier = "device") -> None:
        """Report that `hashes` are now cached; the first one's parent is `parent`, each further one's the one before
        it. What comes to the host has left the device in an order of its own: there, `parent` is empty and they are no
        chain."""

    def report_removed(self, hashes: list[bytes], tier: KVTier = "device") -> None:
        """Report that `hashes` were evicted from this tier."""


class KVEvent(msgspec.Struct, array_like=True, frozen=True):
    """One change of one tier; `hashes` are 16-byte block hashes, one after the other."""

    kind: KVEventKind
    tier: KVTier
    hashes: bytes = b""

    def split(self) -> list[bytes]:
        """The single hashes."""
        data = self.hashes
        return [data[i : i + HASH_BYTES] for i in range(0, len(data), HASH_BYTES)]


class KVEventBatch(msgspec.Struct, array_like=True, frozen=True):
    """Changes of one replica's cache since its batch `sequence - 1`, to be applied in order.

    A snapshot instead holds everything that is cached once batch `sequence` has been applied. Batch 0 follows an empty
    cache. A replica's later incarnation has a greater string.
    """

    replica_id: str
    incarnation: str
    sequence: int
    events: list[KVEvent]
    is_snapshot: bool = False


class KVEventLog:
    """The KVEventSink of an engine replica: engine's thread in, numbered batches and snapshots out.

    It mirrors what is cached, so a snapshot never asks the engine's thread for anything. `flush` and `snapshot` are for
    one other thread.
    """

    def __init__(self, replica_id: str, incarnation: str) -> None:
        self.replica_id = replica_id
        self.incarnation = incarnation
        self._pending: deque[tuple[KVEventKind, KVTier, list[bytes]]] = deque()  # append and popleft are atomic
        self._cached: dict[KVTier, set[bytes]] = {tier: set() for tier in TIERS}
        self._sequence = -1  # the last batch's

    def report_stored(self, parent: bytes, hashes: list[bytes], tier: KVTier = "device") -> None:
        """See KVEventSink."""
        self._pending.append(("stored", tier, hashes))

    def report_removed(self, hashes: list[bytes], tier: KVTier = "device") -> None:
        """See KVEventSink."""
        self._pending.append(("removed", tier, hashes))

    def flush(self) -> KVEventBatch | None:
        """The next batch; None when nothing has changed."""
        changes = {tier: _Change(cached) for tier, cached in self._cached.items()}
        for _ in range(len(self._pending)):
            kind, tier, hashes = self._pending.popleft()
            changes[tier].take(kind, hashes)
        events = [event for tier in TIERS for event in changes[tier].events(tier)]
        if not events:
            return None
        self._sequence += 1
        return KVEventBatch(self.replica_id, self.incarnation, self._sequence, events)

    def snapshot(self) -> KVEventBatch:
        """All that the batches so far add up to; what is still pending comes with the next batch."""
        events = [_event("stored", tier, self._cached[tier]) for tier in TIERS if self._cached[tier]]
        return KVEventBatch(self.replica_id, self.incarnation, self._sequence, events, is_snapshot=True)


class _Change:
    """The net change of one tier, made in its mirror as it is collected."""

    def __init__(self, cached: set[bytes]) -> None:
        self._cached = cached
        self._added: dict[bytes, None] = {}  # a dict keeps the order of the chain
        self._removed: dict[bytes, None] = {}

    def take(self, kind: KVEventKind, hashes: list[bytes]) -> None:
        if kind == "stored":
            self._move(hashes, self._removed, self._added, stored=True)
        else:
            self._move(hashes, self._added, self._removed, stored=False)

    def _move(self, hashes: list[bytes], undone: dict[bytes, None], noted: dict[bytes, None], *, stored: bool) -> None:
        for block_hash in hashes:
            if (block_hash in self._cached) == stored:
                continue
            (self._cached.add if stored else self._cached.discard)(block_hash)
            if block_hash in undone:
                del undone[block_hash]
            else:
                noted[block_hash] = None

    def events(self, tier: KVTier) -> list[KVEvent]:
        found = []
        if self._removed:
            found.append(_event("removed", tier, self._removed))
        if self._added:
            found.append(_event("stored", tier, self._added))
        return found


def _event(kind: KVEventKind, tier: KVTier, hashes: Iterable[bytes]) -> KVEvent:
    return KVEvent(kind, tier, b"".join(hashes))
