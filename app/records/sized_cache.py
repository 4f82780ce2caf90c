"""Keeps values by a key up to a total size, least recently used first out: the host and the workers count alike."""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

ValueT = TypeVar("ValueT")


class SizedCache(Generic[ValueT]):
    """Values with sizes of a caller's unit. What is in use stays alive with its user, kept or not."""

    def __init__(self, max_size: int) -> None:
        self.size = 0
        self._max_size = max_size
        self._entries: OrderedDict[bytes, tuple[ValueT, int]] = OrderedDict()

    def find(self, key: bytes) -> ValueT | None:
        """The value, used just now; None: it is not kept."""
        found = self._entries.get(key)
        if found is None:
            return None
        self._entries.move_to_end(key)
        return found[0]

    def __contains__(self, key: bytes) -> bool:
        """True if it is kept; that is no use of it."""
        return key in self._entries

    def keep(self, key: bytes, value: ValueT, size: int) -> None:
        """Keep a value in place of those used longest ago; not where it alone is too large."""
        if size > self._max_size or key in self._entries:
            return
        while self.size + size > self._max_size:
            self.size -= self._entries.popitem(last=False)[1][1]
        self._entries[key] = value, size
        self.size += size

    def clear(self) -> None:
        """Forget all of them."""
        self._entries.clear()
        self.size = 0
