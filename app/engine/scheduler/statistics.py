"""Holds what the scheduler counts, and its state as one EngineStats for the load book and the gauges."""

from __future__ import annotations

import numpy as np

from app.engine.kv_cache.kv_cache_manager import KVCacheManager
from app.engine.scheduler.adapter_slots import AdapterSlots
from app.engine.scheduler.in_flight import InFlightStep
from app.engine.scheduler.queue_load import WorkCosts, expected_rest
from app.engine.scheduler.row_table import RowTable
from app.engine.scheduler.waiting_queue import WaitingQueue
from app.records.adapter import NO_ADAPTERS
from app.records.outputs import FinishReason
from app.records.request_state import Request
from app.records.stats import EngineStats, OutputLengths, RequestTimings, StatsRecorder, StepCosts, StepStats
from app.records.step import Int32Array
from app.telemetry.figures import Figures


class Statistics:
    """Counts as things happen and passes them on to the recorder, if there is one."""

    def __init__(self, recorder: StatsRecorder | None) -> None:
        self.figures = Figures()
        self.output_lengths = OutputLengths()
        self.costs = StepCosts()
        self.num_paused = 0  # requests held now, running or waiting
        self._num_steps = 0
        self._recorder = recorder

    def count_prefix_hit(self, request: Request, num_cached_tokens: int) -> None:
        """Count a request that is scheduled for the first time, with this many tokens found in the prefix cache."""
        if request.is_canary:
            return
        self.figures.add("prefix_cache_queries", request.num_tokens)
        self.figures.add("prefix_cache_hits", num_cached_tokens)

    def count_drafts(self, step: InFlightStep, rejected: Int32Array | None) -> None:
        """Count the drafts of a step's rows, and at which places they were right; `rejected` [R], None: it had none."""
        drafts = step.num_draft_tokens
        if drafts is None or rejected is None:
            return
        accepted = (drafts - rejected)[drafts > 0]
        self.figures.add("drafts", len(accepted))
        self.figures.add("draft_tokens", int(drafts.sum()))
        self.figures.add("accepted_tokens", int(accepted.sum()))
        for position in range(int(accepted.max(initial=0))):
            self.figures.add(f"accepted_at_{position}", int((accepted > position).sum()))

    def count_preemption(self) -> None:
        """Count a preemption."""
        self.figures.add("preemptions")

    def count_end(self, request: Request, reason: FinishReason, now: float) -> None:
        """Count a request that ended at `now`."""
        self.output_lengths.observe(reason, request.num_output_tokens)
        if self._recorder is not None and not request.is_canary:
            self._recorder.record_finished(RequestTimings.of(request, reason, now))

    def count_step(self, step: StepStats, num_decode_tokens: int) -> None:
        """Count a step whose output was taken in."""
        self._num_steps += 1
        self.figures.add("generation_tokens", step.num_generation_tokens)
        if step.num_prompt_tokens:
            self.figures.add("prompt_tokens", step.num_prompt_tokens)
            self.figures.add("computed_tokens", step.num_prompt_tokens - step.num_cached_tokens)
            self.figures.add("cached_tokens", step.num_cached_tokens)
            self.figures.add("found_tokens", step.num_cached_tokens - step.num_loaded_tokens)
            self.figures.add("loaded_tokens", step.num_loaded_tokens)
        self.costs.observe(step.num_tokens - num_decode_tokens, num_decode_tokens, step.tokens_s)
        if self._recorder is not None:
            self._recorder.record_step(step)

    def work_costs(self, rows: RowTable) -> WorkCosts:
        """Returns what a token costs while as many requests run as now."""
        return WorkCosts(self.costs.prefill_token_s, self.costs.decode_step_s / max(1, rows.num_occupied))

    def snapshot(
        self, rows: RowTable, waiting: WaitingQueue, kv: KVCacheManager, adapters: AdapterSlots | None
    ) -> EngineStats:
        """Read everything once. Reads only, and walks no requests, so any thread may call it while the engine runs."""
        costs, pool, expected = self.costs, kv.pool, self.output_lengths.average
        to_compute, to_generate = waiting.load.outstanding(expected)
        occupied = rows.generation > 0
        # Read in the middle of a step, one counter may be ahead of the other.
        behind = np.maximum(np.minimum(rows.num_tokens, rows.limit) - rows.num_computed, 0)
        room, done = rows.limit + 1 - rows.num_known, rows.num_known - rows.num_prompt
        return EngineStats(
            num_running=rows.num_occupied,
            adapters=NO_ADAPTERS if adapters is None else adapters.state,
            num_waiting=len(waiting),
            num_paused=self.num_paused,
            num_deferred=waiting.load.num_paused,
            num_blocks=kv.num_blocks,
            num_free_blocks=pool.num_free,
            num_cached_blocks=pool.num_cached,
            outstanding_prefill_tokens=to_compute + int(behind[occupied].sum()),
            outstanding_decode_tokens=to_generate + expected_rest(room[occupied], done[occupied], expected),
            steps_total=self._num_steps,
            prefill_token_s=costs.prefill_token_s,
            decode_step_s=costs.decode_step_s,
            prefill_s_total=costs.prefill_s_total,
            queued=waiting.queued(self.work_costs(rows), rows.generation.size) if len(waiting) else (),
            begun_rate=waiting.load.begun.rate,
            figures=self.figures.values() | (kv.connector.figures() if kv.connector is not None else {}),
        )
