"""Chooses the waiting requests that a step begins with, and how many of their tokens it computes.

They are looked at in the order of service, as long as rows, blocks and tokens last. One may be passed by those behind
it only while the long prompts' share of the tokens is spent, or the encoder's, while its adapter finds no slot, or
while another request is just computing much of its prompt: its blocks will be found in the cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from app.engine.kv_cache.kv_cache_manager import KVCacheManager
from app.engine.kv_cache.prefix_hit import PrefixHit
from app.engine.scheduler.adapter_slots import AdapterSlots
from app.engine.scheduler.chunk_grants import ChunkGrants
from app.engine.scheduler.row_table import RowTable
from app.engine.scheduler.slots import Slots
from app.engine.scheduler.step_plan import StepPlan
from app.engine.scheduler.waiting_queue import WaitingQueue
from app.records.request_state import Request

MAX_PASSED_OVER = 16  # waiting requests that a step looks behind for one that can start
MOST_WITHOUT_SLOT = 256  # further ones that wait for a slot of adapters
MIN_SHARED_TOKENS = 128  # computing fewer tokens twice is better than waiting a step or two for another's blocks


class Start(NamedTuple):
    """A waiting request that can begin, behind `num_computed` tokens that are there already."""

    request: Request
    hit: PrefixHit
    num_computed: int
    remaining: int  # tokens left to compute
    room: int  # of them, those that it gets slots for
    chunk: int  # of them, the most that this step computes
    waits: bool  # others compute while it loads what it has in another tier


class Starts:
    """Those of one engine."""

    def __init__(
        self,
        waiting: WaitingQueue,
        rows: RowTable,
        kv: KVCacheManager,
        slots: Slots,
        chunks: ChunkGrants,
        adapters: AdapterSlots | None,
    ) -> None:
        self._waiting = waiting
        self._rows = rows
        self._kv = kv
        self._slots = slots
        self._chunks = chunks
        self._adapters = adapters

    def of_step(self, plan: StepPlan, last_returned: int) -> Iterator[Start]:
        """Requests that can begin in the step that is being planned; one has its row, or has ended, before the next one
        is asked for. `last_returned`: the last step whose output has come."""
        passed = 0
        look_ahead = 0 if self._adapters is None else MOST_WITHOUT_SLOT
        if self._adapters is not None:
            self._adapters.begin_plan()
        for request in self._waiting.first(self._rows.num_free + MAX_PASSED_OVER + 1 + look_ahead):
            if plan.budget.left == 0 or passed == MAX_PASSED_OVER:
                return
            if request.resume_after_step > last_returned:
                return  # its tokens are still coming; nobody takes its place meanwhile
            if self._adapters is not None and not self._adapters.make_room(request, plan):
                continue
            hit = self._kv.find_prefix(request)
            computed = hit.num_blocks * self._kv.block_size
            soon = self._kv.num_coming(request, hit.num_blocks) * self._kv.block_size
            if soon >= MIN_SHARED_TOKENS or plan.budget.chunk(request.num_tokens - computed) <= 0:
                passed += 1
                continue
            least = self._chunks.least(request, computed)
            if least > plan.budget.most:
                return  # who comes later would take these tokens, step by step
            if not self._chunks.begins(request, computed):
                passed += 1
                continue
            if not self._slots.make_room(request, hit, plan):
                return
            num_slots = self._kv.num_slots_after_hit(hit)
            if least > max(1, num_slots):
                return
            yield _start(request, hit, computed, least, num_slots, plan)


def _start(request: Request, hit: PrefixHit, computed: int, least: int, num_slots: int, plan: StepPlan) -> Start:
    """Fixes the first chunk: at least so many tokens, and at most so many slots."""
    remaining = request.num_tokens - computed
    chunk = min(max(plan.budget.chunk(remaining), least), num_slots)
    waits = hit.num_loads > 0 and plan.has_others
    return Start(request, hit, computed, remaining, min(remaining, num_slots) if waits else chunk, chunk, waits)
