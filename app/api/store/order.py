"""The orders in which a store finds its entries without looking at all of them.

Two are heaps whose items are never looked for: one that is no longer true is dropped when it comes to the top, and when
most of them are untrue, the heap is made anew. So each change costs a logarithm, on the average.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator

SPARE = 64  # items that are no longer true, beside as many as there are true ones, before all are looked at


class Largest:
    """Names by a number, which `size` tells now; None of a name that is gone."""

    def __init__(self, size: Callable[[str], int | None]) -> None:
        self._size = size
        self._heap: list[tuple[int, str]] = []
        self._true: dict[str, int] = {}  # what the heap has last of each

    def refresh(self, name: str) -> None:
        """Note what the number is now."""
        size = self._size(name)
        if size is None:
            self._true.pop(name, None)
        elif self._true.get(name) != size:
            self._true[name] = size
            heapq.heappush(self._heap, (-size, name))
        if len(self._heap) > 2 * len(self._true) + SPARE:
            self._heap = [(-size, name) for name, size in self._true.items()]
            heapq.heapify(self._heap)

    def descending(self) -> Iterator[tuple[int, str]]:
        """Numbers and names, the largest first, until the caller has enough."""
        taken: list[tuple[int, str]] = []
        try:
            while self._heap:
                size, name = heapq.heappop(self._heap)
                if self._true.get(name) == -size and (not taken or taken[-1] != (size, name)):
                    taken.append((size, name))
                    yield -size, name
        finally:
            for item in taken:
                heapq.heappush(self._heap, item)


class Dues:
    """Entries by when they are due, in seconds of a clock; each may have been put off, or be gone, by then."""

    def __init__(self, is_due: Callable[[str, str, float], bool], count: Callable[[], int]) -> None:
        """`is_due(tenant, key, when)`: whether that is still when it is due. `count`: how many entries there are."""
        self._is_due, self._count = is_due, count
        self._heap: list[tuple[float, str, str]] = []

    def add(self, when: float, tenant: str, key: str) -> None:
        """An entry is due then."""
        heapq.heappush(self._heap, (when, tenant, key))
        if len(self._heap) > 2 * self._count() + SPARE:
            self._heap = [item for item in set(self._heap) if self._is_due(item[1], item[2], item[0])]
            heapq.heapify(self._heap)

    def until(self, now: float) -> Iterator[tuple[str, str]]:
        """Tenants and keys of what is due by now, each once."""
        while self._heap and self._heap[0][0] <= now:
            when, tenant, key = heapq.heappop(self._heap)
            if self._is_due(tenant, key, when):
                yield tenant, key


class Ages:
    """Keys in the order of their making, by a number that counts up; most of those that are gone are left out at
    once, a few later."""

    def __init__(self) -> None:
        self._made: list[int] = []
        self._keys: list[str] = []
        self._num_gone = 0

    def __len__(self) -> int:
        return len(self._made) - self._num_gone

    def add(self, made: int, key: str) -> None:
        """A key is there from now on; `made` is more than that of all others."""
        self._made.append(made)
        self._keys.append(key)

    def count_gone(self, is_there: Callable[[str, int], bool]) -> None:
        """Count one that is gone; `is_there` tells of each."""
        self._num_gone += 1
        if 2 * self._num_gone > len(self._made) + SPARE:
            left = [(made, key) for made, key in zip(self._made, self._keys, strict=True) if is_there(key, made)]
            self._made, self._keys = [made for made, _ in left], [key for _, key in left]
            self._num_gone = 0

    def walk(self, after: int | None, newest_first: bool) -> Iterator[tuple[int, str]]:
        """Numbers and keys from after that number on, in this direction; some may be gone."""
        if newest_first:
            end = len(self._made) if after is None else bisect_left(self._made, after)
            places = range(end - 1, -1, -1)
        else:
            places = range(0 if after is None else bisect_right(self._made, after), len(self._made))
        for place in places:
            yield self._made[place], self._keys[place]
