"""Turns a plan into a step message: counts move on, and what the step asked for is remembered until it returns."""

from __future__ import annotations

from collections import deque

import numpy as np
from numpy.typing import NDArray

from app.engine.kv_cache.kv_cache_manager import KVCacheManager
from app.engine.scheduler.in_flight import InFlightStep
from app.engine.scheduler.pending_diffs import PendingDiffs
from app.engine.scheduler.row_table import IntArray, RowTable
from app.engine.scheduler.steady_decode import SteadyDecode
from app.engine.scheduler.step_plan import StepPlan
from app.engine.scheduler.token_masks import token_masks
from app.records.step import Int32Array, SchedulerOutput


class StepWriter:
    """Numbers the steps, in the order in which the workers get them."""

    def __init__(self, rows: RowTable, kv: KVCacheManager, diffs: PendingDiffs, *, drafts: bool) -> None:
        self.next_step_id = 1
        self.in_flight: deque[InFlightStep] = deque()
        self._rows = rows
        self._kv = kv
        self._diffs = diffs
        self._drafts = drafts  # the workers propose some

    def write(self, decodes: IntArray, plan: StepPlan, *, is_alone: bool) -> SchedulerOutput:
        """The step of these rows and the plan's chunks. `is_alone`: nobody waits, so that a step without a successor is
        to come back at once."""
        table = self._rows
        rows = decodes.astype(np.int32)
        counts = np.ones(decodes.size, np.int32) if plan.drafts is None else plan.drafts + np.int32(1)
        if plan.chunks:
            rows = np.concatenate([rows, np.array([request.row for request in plan.chunks], np.int32)])
            counts = np.concatenate([counts, np.array(list(plan.chunks.values()), np.int32)])
        computed = table.num_computed[rows] + counts
        samples: NDArray[np.bool_] = computed >= table.num_tokens[rows]
        table.num_computed[rows] = computed
        table.num_tokens[rows] = np.maximum(table.num_tokens[rows], computed + samples)
        drafts = self._write_drafts(rows, samples, plan)
        num_decode_tokens = decodes.size + (0 if plan.drafts is None else int(plan.drafts.sum()))
        num_tokens = num_decode_tokens + sum(plan.chunks.values())
        table.last_step[rows] = self.next_step_id
        num_proposed = plan.num_proposed if table.may_draft[rows[samples]].any() else 0
        message = self._send(
            InFlightStep(
                self.next_step_id,
                rows,
                counts,
                samples,
                table.generation[rows],
                num_tokens,
                num_decode_tokens,
                drafts,
                num_proposed,
            )
        )
        if table.has_grammar.any():
            message.masks = token_masks(table, rows[samples], None if drafts is None else drafts[samples])
        # No further step can be written before this one's tokens are back, which its masks are to blame for: then they
        # are wanted at once, not with the next step message.
        message.flush = message.masks is not None and is_alone and not table.pending().any()
        return message

    def remember(self) -> SteadyDecode | None:
        """The step written last, as the first of a steady row of its like; None: the next one needs a plan."""
        return SteadyDecode.of(self.in_flight[-1], self._rows, self._kv.block_size)

    def write_next(self, steady: SteadyDecode) -> SchedulerOutput:
        """One more step of the same rows, whose blocks are there."""
        return self._send(steady.advance(self.next_step_id, self._rows))

    def flush(self) -> SchedulerOutput:
        """An empty step message that brings back every output still on the device; it expects none of its own."""
        empty = np.empty(0, np.int32)
        return self._message(empty, empty, np.empty(0, np.bool_), flush=True)

    def _send(self, step: InFlightStep) -> SchedulerOutput:
        self.in_flight.append(step)
        message = self._message(step.rows, step.num_scheduled_tokens, step.samples)
        message.num_draft_tokens, message.num_proposed = step.num_draft_tokens, step.num_proposed
        return message

    def _write_drafts(self, rows: Int32Array, samples: NDArray[np.bool_], plan: StepPlan) -> Int32Array | None:
        """Drafts of all rows of the step, whose rows that sample will have new ones (those with a grammar when their
        tokens are back); None: there are none."""
        if not self._drafts:
            return None
        sampled, table = rows[samples], self._rows
        own = np.minimum(table.most_drafts[sampled], plan.num_proposed)
        table.num_drafts[sampled] = own * (table.may_draft & ~table.has_grammar)[sampled]
        if plan.drafts is None:
            return None
        return np.concatenate([plan.drafts, np.zeros(len(rows) - len(plan.drafts), np.int32)])

    def _message(
        self, rows: Int32Array, counts: Int32Array, samples: NDArray[np.bool_], flush: bool = False
    ) -> SchedulerOutput:
        step_id = self.next_step_id
        self.next_step_id += 1
        state_copies = self._kv.take_state_copies()  # first: they may take blocks whose contents the connector stores
        return SchedulerOutput(
            step_id,
            rows,
            counts,
            samples,
            new_requests=self._diffs.take_new_requests(),
            new_blocks=self._diffs.take_new_blocks(),
            freed_rows=self._diffs.take_freed_rows(),
            rejected_drafts=self._diffs.take_rejected_drafts(),
            transfers=self._kv.take_transfers(),
            state_copies=state_copies,
            flush=flush,
        )
