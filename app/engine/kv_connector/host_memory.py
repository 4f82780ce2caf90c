"""A bounded pool of KV blocks in the workers' host memory: what the device evicts, least recently used first.

Invariants: a slot is free or belongs to one hash. A slot that the next step message loads from is not given away before
that step message is written. A block that was loaded stays in the pool too, so that evicting it again costs no copy.
Every worker keeps its own share of each block under the same slot number, so one account serves all ranks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from app.engine.kv_connector.base import KVConnector
from app.records.host_pool import HostPoolReport, KVTransfers
from app.records.kv_events import KVEventSink


class HostMemory(KVConnector):
    """Slots 0 .. num_blocks - 1; every operation is O(1) per block."""

    worker = "app.worker.host_tier.host_tier:create"

    def __init__(self, num_blocks: int, block_bytes: int = 0, sink: KVEventSink | None = None) -> None:
        """Room for `num_blocks` blocks, of which each has `block_bytes` over all workers."""
        assert num_blocks > 0
        self.num_blocks = num_blocks
        self.block_bytes = block_bytes
        self._sink = sink
        self._slots: OrderedDict[bytes, int] = OrderedDict()  # hash -> slot, least recently used first
        self._free = list(range(num_blocks - 1, -1, -1))
        self._held: set[bytes] = set()  # until the next step message
        self._stores: dict[int, int] = {}  # slot -> device block, in the next step message
        self._loads: list[tuple[int, int]] = []  # (slot, device block), in the next step message
        self._query_tokens = self._hit_tokens = 0
        self._num_loaded = self._num_stored = 0

    @classmethod
    def of(cls, reports: Sequence[HostPoolReport], sink: KVEventSink | None) -> HostMemory:
        """See KVConnector."""
        num_blocks = min(report.num_blocks for report in reports)
        return cls(num_blocks, sum(report.block_bytes for report in reports), sink)

    def match(self, hashes: Sequence[bytes]) -> int:
        """See KVConnector."""
        slots = self._slots
        for count, block_hash in enumerate(hashes):
            if block_hash not in slots:
                return count
        return len(hashes)

    def hold(self, hashes: Sequence[bytes]) -> None:
        """See KVConnector; the first block becomes the most recently used, so what is left in the end is a prefix."""
        for block_hash in reversed(hashes):
            self._slots.move_to_end(block_hash)
        self._held.update(hashes)

    def load(self, hashes: Sequence[bytes], blocks: Sequence[int]) -> None:
        """See KVConnector."""
        assert self._held.issuperset(hashes), "load without hold"
        self._loads += [(self._slots[block_hash], block) for block_hash, block in zip(hashes, blocks, strict=True)]

    def take_evicted(self, hashes: list[bytes], blocks: list[int]) -> None:
        """See KVConnector. Blocks come in the order in which the device gave them up, the least useful first."""
        stored: dict[bytes, None] = {}
        removed: list[bytes] = []
        for block_hash, block in zip(hashes, blocks, strict=True):
            if block_hash in self._slots:
                self._slots.move_to_end(block_hash)
                continue
            slot = self._free.pop() if self._free else self._give_up(stored, removed)
            if slot is None:  # everything is about to be loaded
                break
            self._slots[block_hash] = slot
            self._stores[slot] = block
            stored[block_hash] = None
        if self._sink is not None and removed:
            self._sink.report_removed(removed, "host")
        if self._sink is not None and stored:
            self._sink.report_stored(b"", list(stored), "host")

    def _give_up(self, stored: dict[bytes, None], removed: list[bytes]) -> int | None:
        """The slot of the least recently used block that is not held, which is forgotten."""
        victim = next((block_hash for block_hash in self._slots if block_hash not in self._held), None)
        if victim is None:
            return None
        if victim in stored:  # it is in the same batch, and not announced yet
            del stored[victim]
        else:
            removed.append(victim)
        return self._slots.pop(victim)

    def forget(self) -> None:
        """See KVConnector."""
        assert not self._stores, "a step message is being written"
        assert not self._loads, "a step message is being written"
        removed = list(self._slots)
        self._free += self._slots.values()
        self._slots.clear()
        self._held.clear()
        if self._sink is not None and removed:
            self._sink.report_removed(removed, "host")

    def count_lookup(self, num_tokens: int, num_hit_tokens: int) -> None:
        """See KVConnector."""
        self._query_tokens += num_tokens
        self._hit_tokens += num_hit_tokens

    def take_transfers(self) -> KVTransfers | None:
        """See KVConnector."""
        self._held.clear()
        if not self._stores and not self._loads:
            return None
        stores, self._stores = self._stores, {}
        loads, self._loads = np.array(self._loads, np.int32).reshape(-1, 2), []
        self._num_stored += len(stores)
        self._num_loaded += len(loads)
        return KVTransfers(
            np.array(list(stores.values()), np.int32), np.array(list(stores), np.int32), loads[:, 0], loads[:, 1]
        )

    @property
    def num_cached(self) -> int:
        """Blocks that can be found."""
        return len(self._slots)

    def figures(self) -> dict[str, float]:
        """See KVConnector."""
        return {
            "tier_queries": self._query_tokens,
            "tier_hits": self._hit_tokens,
            "kv_host_usage": self.num_cached / self.num_blocks,
            "kv_host_stored_bytes": self._num_stored * self.block_bytes,
            "kv_host_loaded_bytes": self._num_loaded * self.block_bytes,
        }

    def check(self) -> None:
        """Assert the invariants at the head of this file; for tests, O(num_blocks)."""
        used = list(self._slots.values())
        assert len(set(used)) == len(used)
        assert sorted(used + self._free) == list(range(self.num_blocks))
        assert self._held <= self._slots.keys()
        assert len(dict(self._loads)) <= len(self._held)
