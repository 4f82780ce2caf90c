"""Grants prompts their chunks of a step: how many tokens, by the step's budget, by blocks, and by what they show."""

from __future__ import annotations

from app.engine.kv_cache.kv_cache_manager import KVCacheManager
from app.engine.scheduler.encoder_share import EncoderShare
from app.engine.scheduler.row_table import IntArray, RowTable
from app.engine.scheduler.slots import Slots
from app.engine.scheduler.step_plan import StepPlan
from app.records.request_state import Request


class ChunkGrants:
    """Those of one engine."""

    def __init__(self, rows: RowTable, kv: KVCacheManager, slots: Slots, encoders: EncoderShare) -> None:
        self._rows = rows
        self._kv = kv
        self._slots = slots
        self._encoders = encoders

    def grant_running(self, behind: IntArray, plan: StepPlan) -> None:
        """Chunks for running requests that are more than one token short."""
        for request in self._rows.in_order(behind):
            if plan.budget.left == 0:
                break
            if request.row < 0:
                continue
            remaining = request.num_tokens - int(self._rows.num_computed[request.row])
            chunk = plan.budget.chunk(remaining)
            if chunk > 0:
                self._grant(request, chunk, remaining, plan, may_preempt=True)

    def spend_rest(self, plan: StepPlan) -> None:
        """Tokens that nobody short wanted go to the long requests of the step."""
        for request, granted in list(plan.chunks.items()):
            if plan.budget.left == 0:
                break
            if request.row < 0:
                continue
            remaining = request.num_tokens - int(self._rows.num_computed[request.row]) - granted
            if remaining > 0:
                self._grant(request, min(remaining, plan.budget.left), remaining, plan, may_preempt=False)

    def begins(self, request: Request, computed: int) -> bool:
        """True if a waiting request may compute the token behind `computed` ones in this step; see EncoderShare."""
        return self._encoders.begins(request, computed)

    def least(self, request: Request, computed: int) -> int:
        """Fewest tokens of the first chunk of a waiting request, behind `computed` tokens that are there."""
        return self._encoders.least_end(request, computed) - computed

    def cut(self, request: Request, begin: int, end: int) -> int:
        """The end, `end` or an earlier one, of a prompt's chunk that begins behind `begin` tokens."""
        return self._encoders.cut(request, begin, self._kv.cut(request, begin, end))

    def _grant(self, request: Request, chunk: int, remaining: int, plan: StepPlan, may_preempt: bool) -> None:
        """Give up to `chunk` more tokens, as many as there are blocks for; at least one if that takes preemption."""
        begin = int(self._rows.num_computed[request.row])
        computed = begin + plan.chunks.get(request, 0)
        room, least = self._slots.room(request, computed), self._encoders.least_end(request, computed)
        if least - computed > plan.budget.most:
            return
        chunk = max(chunk, least - computed)
        if room < least - computed:
            if not may_preempt or not self._slots.ensure(request, least, plan):
                return
            room = self._slots.room(request, computed)
        chunk = self.cut(request, begin, computed + min(chunk, room)) - computed
        if chunk <= 0:
            return
        if computed == begin:
            self._kv.chunk_begins(request, begin)
        granted = self._slots.ensure(request, computed + chunk, plan)
        assert granted
        plan.chunks[request] = plan.chunks.get(request, 0) + chunk
        plan.budget.spend(chunk, remaining)
