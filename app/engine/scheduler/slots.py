"""Gives running requests slots of the KV cache for their next tokens, and takes them from others where there are none.

Blocks are taken from requests of lower rank (preemption by recomputation), so the request of the highest rank always
makes progress.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from app.engine.kv_cache.kv_cache_manager import KVCacheManager
from app.engine.kv_cache.prefix_hit import PrefixHit
from app.engine.scheduler.pending_diffs import PendingDiffs
from app.engine.scheduler.row_table import IntArray, RowTable
from app.engine.scheduler.step_plan import StepPlan
from app.records.request_state import Request


class Slots:
    """Those of one engine. `preempt` takes a request out of its row, and out of the step that is being planned."""

    def __init__(
        self, rows: RowTable, kv: KVCacheManager, diffs: PendingDiffs, preempt: Callable[[Request, StepPlan], None]
    ) -> None:
        self._rows = rows
        self._kv = kv
        self._diffs = diffs
        self._preempt = preempt

    def room(self, request: Request, computed: int) -> int:
        """Slots past `computed` that the request has or could get without preemption."""
        return int(self._rows.capacity[request.row]) + self._kv.num_free_slots - computed

    def ensure(self, request: Request, num_tokens: int, plan: StepPlan) -> bool:
        """Slots for the first `num_tokens` tokens; may preempt requests of lower rank. False: not in this step."""
        while (blocks := self._kv.grow(request, num_tokens)) is None:
            needed = self._kv.num_missing(request, num_tokens)
            if self._kv.pool.num_free + self._kv.pool.num_deferred >= needed:
                return False  # blocks are on their way back
            victim = self._victim(request)
            if victim is None:
                return False
            self._preempt(victim, plan)
        if blocks:
            self._rows.capacity[request.row] = self._kv.num_slots(request)
            self._diffs.add_blocks(request.row, blocks)
        return True

    def grow_each(self, rows: IntArray) -> bool:
        """One more block for each of these rows; False, with nothing changed, where there are too few."""
        if not rows.size:
            return True
        if rows.size * self._kv.num_groups > self._kv.pool.num_free:
            return False
        numbers = rows.tolist()
        blocks = self._kv.grow_each([self._rows.request_at(row) for row in numbers])
        self._rows.capacity[rows] += self._kv.block_size
        self._diffs.add_blocks_each(numbers, blocks)
        return True

    def grant_decodes(self, decodes: IntArray, plan: StepPlan) -> IntArray:
        """Rows that compute one token; only those at a block edge need a look."""
        rows = self._rows
        if decodes.size > plan.budget.left:
            first = rows.in_order(decodes)[: plan.budget.left]
            decodes = np.sort(np.array([request.row for request in first], np.intp))
        short = decodes[rows.num_computed[decodes] >= rows.capacity[decodes]]
        if not self.grow_each(short):
            for request in rows.in_order(short):
                if request.row >= 0:  # not preempted by one before it
                    self.ensure(request, int(rows.num_computed[request.row]) + 1, plan)
            decodes = decodes[rows.runnable[decodes] & (rows.num_computed[decodes] < rows.capacity[decodes])]
        plan.budget.left -= decodes.size
        return decodes

    def _victim(self, request: Request) -> Request | None:
        """Chooses who gives way to `request`: paused requests first, then the one of the lowest rank below it."""
        others = [
            other
            for other in self._rows.occupants()
            if other is not request and (other.paused or other.rank > request.rank)
        ]
        return max(others, key=lambda other: (other.paused, other.rank), default=None)

    def make_room(self, request: Request, hit: PrefixHit, plan: StepPlan) -> bool:
        """A row and blocks for a waiting request. Held requests keep nobody waiting: they give theirs, if need be."""
        while not self._rows.num_free or not self._kv.fits(request.num_tokens, hit, self._rows.running()):
            paused = [occupant for occupant in self._rows.occupants() if occupant.paused]
            if not paused or self._kv.pool.num_deferred:
                return False
            self._preempt(max(paused, key=lambda occupant: occupant.rank), plan)
        return True
