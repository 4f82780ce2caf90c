"""The adapters of one modelled replica: all lie in host memory, its rows' in slots, by the worker's own table."""

from __future__ import annotations

from collections import Counter

from app.deployments.routing.policies.prefix_aware import ADAPTER_LOAD_S
from app.records.adapter import AdapterState
from app.worker.lora.slot_table import SlotTable

NUM_SLOTS = 16


class SimAdapters:
    """Rows enter and leave with their adapters' digests, "" for none."""

    def __init__(self) -> None:
        self.num_loads = 0
        self._table = SlotTable(NUM_SLOTS)
        self._rows: Counter[str] = Counter()
        self._load_s = 0.0

    def has_room(self, digest: str) -> bool:
        """True if a row may have the adapter."""
        return not digest or digest in self._rows or len(self._rows) < NUM_SLOTS

    def enter(self, digest: str) -> None:
        """A row computes with it from now on, once it was copied."""
        if not digest:
            return
        self._rows[digest] += 1
        _, is_new = self._table.enter(bytes.fromhex(digest))
        self.num_loads += is_new
        self._load_s += ADAPTER_LOAD_S * is_new

    def leave(self, digest: str) -> None:
        """A row is done with it."""
        if digest:
            self._table.leave(bytes.fromhex(digest))
            self._rows -= Counter([digest])

    def take_load_s(self) -> float:
        """Seconds of copies that the next step waits for."""
        load_s, self._load_s = self._load_s, 0.0
        return load_s

    @property
    def state(self) -> AdapterState:
        """Returns what its heartbeat tells."""
        return AdapterState(num_slots=NUM_SLOTS, running=tuple(self._rows))
