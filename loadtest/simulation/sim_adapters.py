"""The adapters of one modelled replica: its rows' lie in slots, by the worker's own table, and behind these all of them
in host memory, or as many as have places there: the others are read when a request asks for them."""

from __future__ import annotations

from collections import Counter, OrderedDict

from app.deployments.routing.policies.prefix_aware import ADAPTER_LOAD_S
from app.records.adapter import AdapterState
from app.worker.lora.slot_table import SlotTable

NUM_SLOTS = 16
READ_S = 0.25  # of rank 16 and 8 billion weights, from a disk whose files are in memory


class AllBut(tuple[str, ...]):
    """The digests of all adapters but these: those that lie on disk."""

    def __contains__(self, digest: object) -> bool:
        return not super().__contains__(digest)


class SimAdapters:
    """Rows enter and leave with their adapters' digests, "" for none. `places`: adapters in host memory; 0: all."""

    def __init__(self, places: int = 0) -> None:
        self.num_loads = self.num_reads = 0
        self._table = SlotTable(NUM_SLOTS)
        self._rows: Counter[str] = Counter()
        self._load_s = 0.0
        self._places = places
        self._host: OrderedDict[str, None] = OrderedDict()  # the one that was asked for longest ago first
        self._reading, self._read_until = "", 0.0
        self._now = 0.0

    def advance(self, now: float) -> None:
        """So late it is."""
        self._now = now
        if self._reading and now >= self._read_until:
            self._host[self._reading] = None
            self._reading = ""

    @property
    def left_s(self) -> float | None:
        """Seconds until the adapter that is being read has come; None: none is."""
        return self._read_until - self._now if self._reading else None

    def has_room(self, digest: str) -> bool:
        """True if a row may have the adapter, which is read where it lies on disk, one after another."""
        if digest and self._places and digest not in self._host:
            self._read(digest)
            return False
        return not digest or digest in self._rows or len(self._rows) < NUM_SLOTS

    def _read(self, digest: str) -> None:
        if self._reading:
            return
        if len(self._host) >= self._places:
            unused = next((other for other in self._host if other not in self._rows), None)
            if unused is None:
                return
            del self._host[unused]
            self._table.drop(bytes.fromhex(unused))
        self._reading, self._read_until = digest, self._now + READ_S
        self.num_reads += 1

    def enter(self, digest: str) -> None:
        """A row computes with it from now on, once it was copied."""
        if not digest:
            return
        self._rows[digest] += 1
        if self._places:
            self._host.move_to_end(digest)
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
        on_disk = AllBut(self._host) if self._places else ()
        return AdapterState(num_slots=NUM_SLOTS, running=tuple(self._rows), on_disk=on_disk, read_s=READ_S)
