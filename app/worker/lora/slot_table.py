"""Knows which adapter lies in which slot, and how many rows compute with it.

Every rank is given the same rows in the same order, and so finds the same slots by itself. That there is one free, the
scheduler sees to (engine/scheduler/adapter_slots.py): rows have at most as many adapters as there are slots.
"""

from __future__ import annotations

from collections import OrderedDict


class SlotTable:
    """Slots of adapters by their digests; of those without rows, the one that was left longest ago goes first."""

    def __init__(self, num_slots: int) -> None:
        self._free = list(range(num_slots - 1, -1, -1))
        self._slots: dict[bytes, int] = {}
        self._num_rows: dict[bytes, int] = {}  # of those with rows
        self._unwanted: set[bytes] = set()  # those whose last row takes the slot with it
        self._idle: OrderedDict[bytes, None] = OrderedDict()  # of those without, the least recently used first

    @property
    def resident(self) -> dict[bytes, int]:
        """The adapters that lie in slots."""
        return dict(self._slots)

    def enter(self, digest: bytes) -> tuple[int, bool]:
        """The slot of one more row's adapter, and whether the adapter has to be put there first."""
        if digest in self._slots:
            self._unwanted.discard(digest)
            self._idle.pop(digest, None)
            self._num_rows[digest] = self._num_rows.get(digest, 0) + 1
            return self._slots[digest], False
        if not self._free:
            assert self._idle, "rows have more adapters than there are slots"
            self.drop(next(iter(self._idle)))
        self._slots[digest] = slot = self._free.pop()
        self._num_rows[digest] = 1
        return slot, True

    def leave(self, digest: bytes) -> None:
        """A row is done with its adapter, which stays where it is until its slot is needed."""
        self._num_rows[digest] -= 1
        if not self._num_rows[digest]:
            del self._num_rows[digest]
            self._idle[digest] = None
            if digest in self._unwanted:
                self.drop(digest)

    def drop(self, digest: bytes) -> None:
        """Give the slot of an adapter away, if it has one, once its rows have been freed."""
        if digest in self._num_rows:
            self._unwanted.add(digest)
            return
        self._unwanted.discard(digest)
        self._idle.pop(digest, None)
        if digest in self._slots:
            self._free.append(self._slots.pop(digest))
