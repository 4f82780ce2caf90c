"""Stands between a block pool that holds copies of states, too, and who hears of its changes.

A copy lies in blocks of its own, found by the hash of the block that it stands behind and its place among them. Of
those the outside hears nothing; it hears of the states (tier "state"), without which blocks are no hit.
"""

from __future__ import annotations

from app.records.block_hash import HASH_BYTES
from app.records.kv_events import EMPTY_PREFIX, KVEventSink, KVTier


class StateEvents:
    """A KVEventSink of the pool and its connector, which passes on what concerns blocks of tokens.

    It notes behind which hashes a state may be gone: one of its blocks left a tier, or the one that it stands behind.
    """

    def __init__(self, sink: KVEventSink | None) -> None:
        self._sink = sink
        self.doubtful: set[bytes] = set()
        self.announce(EMPTY_PREFIX)

    def report_stored(self, parent: bytes, hashes: list[bytes], tier: KVTier = "device") -> None:
        """See KVEventSink."""
        if self._sink is not None and (shown := [key for key in hashes if len(key) == HASH_BYTES]):
            self._sink.report_stored(parent, shown, tier)

    def report_removed(self, hashes: list[bytes], tier: KVTier = "device") -> None:
        """See KVEventSink."""
        self.doubtful.update(key[:HASH_BYTES] for key in hashes)
        if self._sink is not None and (shown := [key for key in hashes if len(key) == HASH_BYTES]):
            self._sink.report_removed(shown, tier)

    def announce(self, key: bytes) -> None:
        """A state can be found from now on."""
        if self._sink is not None:
            self._sink.report_stored(b"", [key], "state")

    def withdraw(self, keys: list[bytes]) -> None:
        """These states are found no longer."""
        if self._sink is not None and keys:
            self._sink.report_removed(keys, "state")
