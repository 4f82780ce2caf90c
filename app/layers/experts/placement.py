"""Decides which slots hold which experts: the busiest ones several times, ranks equally busy.

The algorithm is EPLB's (DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, section 3.4) for ranks that are alike: each
spare slot goes to the expert with the largest load of a copy, then copies go to ranks, the heaviest first to the
lightest rank with room. Ranks are numbered so that most experts stay where they are. Every rank computes this by itself
from the same counts, so nothing here may depend on anything else.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Slots = NDArray[np.int64]  # [R, S]: the expert in each slot of each rank
Loads = NDArray[np.float64]  # [E]: tokens, or any share of them

SWAPS = 64  # most of them that refine a placement
EVEN = 1.02  # busiest over mean: even enough to stop refining
LIGHTEST = 4  # bins that are looked at for a swap


def first_slots(num_experts: int, num_ranks: int, num_redundant: int) -> Slots:
    """The placement to begin with, [R, S]: experts in order, spare slots for experts of the ranks behind.

    Ranks have as many slots each: what does not divide is rounded up.
    """
    per_rank = -(-(num_experts + num_redundant) // num_ranks)
    ends = [num_experts * (rank + 1) // num_ranks for rank in range(num_ranks)]
    slots = np.empty((num_ranks, per_rank), dtype=np.int64)
    for rank, first in enumerate([0, *ends[:-1]]):
        slots[rank] = (first + np.arange(per_rank)) % num_experts  # its own, then those of the rank behind
    return slots


def copies_of(loads: Loads, num_slots: int, num_ranks: int) -> NDArray[np.int64]:
    """Decides how often each expert is held: [E], at least once, no more often than there are ranks, `num_slots`
    together."""
    copies = np.ones(len(loads), dtype=np.int64)
    heap = [(-load, expert) for expert, load in enumerate(loads.tolist())]
    heapq.heapify(heap)
    for _ in range(num_slots - len(loads)):
        _, expert = heapq.heappop(heap)
        copies[expert] += 1
        if copies[expert] < num_ranks:
            heapq.heappush(heap, (-float(loads[expert]) / int(copies[expert]), expert))
    return copies


def rank_loads(loads: Loads, slots: Slots) -> NDArray[np.float64]:
    """Returns what each rank has to do, [R]: a token takes any of its expert's copies."""
    share = loads / np.maximum(np.bincount(slots.ravel(), minlength=len(loads)), 1)
    total: NDArray[np.float64] = share[slots].sum(axis=1)
    return total


def imbalance(loads: Loads, slots: Slots) -> float:
    """The busiest rank's load over the mean; 1 where there is none."""
    busy = rank_loads(loads, slots)
    return float(busy.max() / busy.mean()) if busy.sum() > 0 else 1.0


def place(loads: Loads, held: Slots) -> Slots:
    """A placement [R, S] for these loads, near the one that holds now."""
    packing = _Packing.of(loads, held.shape)
    packing.refine()
    return _near(packing.bins, held)


@dataclass(slots=True)
class _Packing:
    """Copies of experts in bins that are no ranks yet."""

    share: list[float]  # load of one copy of each expert
    bins: list[list[int]]  # experts
    loads: list[float]  # of the bins

    @classmethod
    def of(cls, loads: Loads, shape: tuple[int, ...]) -> _Packing:
        """The heaviest copy first, to the lightest bin with room, and without a copy of it where there is one."""
        num_bins, room = shape
        copies = copies_of(loads, num_bins * room, num_bins)
        share = (loads / copies).tolist()
        items = np.repeat(np.arange(len(loads)), copies)
        order = np.lexsort((items, -np.asarray(share)[items]))
        bins: list[list[int]] = [[] for _ in range(num_bins)]
        heap = [(0.0, number) for number in range(num_bins)]
        for expert in items[order].tolist():
            passed = []
            while heap and expert in bins[heap[0][1]]:
                passed.append(heapq.heappop(heap))
            load, number = heapq.heappop(heap) if heap else passed.pop(0)
            bins[number].append(expert)
            if len(bins[number]) < room:
                heapq.heappush(heap, (load + share[expert], number))
            for entry in passed:
                heapq.heappush(heap, entry)
        return cls(share, bins, [sum(share[expert] for expert in one) for one in bins])

    def refine(self) -> None:
        """Swap copies of the heaviest bin for lighter ones of others, as long as that makes both lighter than it."""
        mean = sum(self.loads) / len(self.loads)
        for _ in range(SWAPS):
            *_, heaviest = order = sorted(range(len(self.bins)), key=self.loads.__getitem__)
            if self.loads[heaviest] <= EVEN * mean:
                return
            best = min(self._swaps(heaviest, order[:LIGHTEST]), default=None)
            if best is None:
                return
            _, other, mine, theirs = best
            a, b = self.bins[heaviest][mine], self.bins[other][theirs]
            self.bins[heaviest][mine], self.bins[other][theirs] = b, a
            self.loads[heaviest] += self.share[b] - self.share[a]
            self.loads[other] += self.share[a] - self.share[b]

    def _swaps(self, heaviest: int, others: list[int]) -> list[tuple[float, int, int, int]]:
        """(the larger load afterwards, other bin, place in the heaviest, place in the other)."""
        top, found = self.loads[heaviest], []
        for other in others:
            load = self.loads[other]
            for theirs, b in enumerate(self.bins[other]):
                if b in self.bins[heaviest]:
                    continue
                for mine, a in enumerate(self.bins[heaviest]):
                    moved = self.share[a] - self.share[b]
                    after = max(top - moved, load + moved)
                    if moved > 0 and after < top * (1 - 1e-9) and a not in self.bins[other]:
                        found.append((after, other, mine, theirs))
        return found


def _near(bins: list[list[int]], held: Slots) -> Slots:
    """The bins as ranks: each the one that shares most experts with it, which stay in their slots."""
    num_experts, num_ranks = int(held.max()) + 1, len(held)
    # No library's threads: they would take the cores that steps need.
    overlaps = np.einsum("be,re->br", _is_in(np.asarray(bins), num_experts), _is_in(held, num_experts))
    slots, placed, taken = held.copy(), set[int](), set[int]()
    for place in np.argsort(-overlaps, axis=None, kind="stable").tolist():
        number, rank = divmod(place, num_ranks)
        if number not in placed and rank not in taken:
            placed.add(number)
            taken.add(rank)
            slots[rank] = _in_slots(bins[number], held[rank].tolist())
    return slots


def _is_in(rows: Slots, num_experts: int) -> NDArray[np.float32]:
    """[R, S] of experts -> [R, E], 1 where a row has the expert."""
    found = np.zeros((len(rows), num_experts), dtype=np.float32)
    np.put_along_axis(found, rows, 1, axis=1)
    return found


def _in_slots(experts: list[int], held: list[int]) -> list[int]:
    """The experts in a rank's slots, those that it holds already in theirs."""
    left = list(experts)
    kept: list[int | None] = []
    for expert in held:
        stays = expert in left
        kept.append(expert if stays else None)
        if stays:
            left.remove(expert)
    return [left.pop(0) if expert is None else expert for expert in kept]
