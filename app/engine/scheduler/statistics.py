"""What the scheduler counts, and its state as one EngineStats for the load book and the gauges."""

from __future__ import annotations

import numpy as np

from app.engine.kv_cache.kv_cache_manager import KVCacheManager
from app.engine.outputs import FinishReason
from app.engine.scheduler.queue_load import WorkCosts, expected_rest
from app.engine.scheduler.request import Request
from app.engine.scheduler.row_table import RowTable
from app.engine.scheduler.waiting_queue import WaitingQueue
from app.engine.stats import EngineCounters, EngineStats, RequestTimings, StatsRecorder, StepCosts, StepStats


class Statistics:
    """Counts as things happen and passes them on to the recorder, if there is one."""

    def __init__(self, recorder: StatsRecorder | None) -> None:
        self.counters = EngineCounters()
        self.costs = StepCosts()
        self.num_paused = 0  # requests held now, running or waiting
        self._recorder = recorder

    def request_started(self, request: Request, num_cached_tokens: int) -> None:
        """A request was scheduled for the first time, with this many tokens found in the prefix cache."""
        if request.is_canary:
            return
        self.counters.prefix_cache_queries += request.num_tokens
        self.counters.prefix_cache_hits += num_cached_tokens

    def request_preempted(self) -> None:
        """Count a preemption."""
        self.counters.preemptions += 1

    def request_finished(self, request: Request, reason: FinishReason, now: float) -> None:
        """A request ended at `now`."""
        self.counters.request_finished(reason, request.num_output_tokens)
        if self._recorder is not None and not request.is_canary:
            self._recorder.record_finished(RequestTimings.of(request, reason, now))

    def step_returned(self, step: StepStats, num_decode_tokens: int) -> None:
        """A step's output was taken in."""
        counters = self.counters
        counters.steps += 1
        counters.iteration_tokens = step.num_tokens
        counters.generation_tokens += step.num_generation_tokens
        counters.prompt_tokens += step.num_prompt_tokens
        counters.computed_tokens += step.num_prompt_tokens - step.num_cached_tokens
        counters.found_tokens += step.num_cached_tokens - step.num_loaded_tokens
        counters.loaded_tokens += step.num_loaded_tokens
        self.costs.observe(step.num_tokens - num_decode_tokens, num_decode_tokens, step.step_time_s)
        if self._recorder is not None:
            self._recorder.record_step(step)

    def experts_moved(self, count: int, imbalance: float) -> None:
        """What the workers did for the balance of experts, and what they found."""
        self.counters.moved_experts += count
        self.counters.expert_imbalance = imbalance or self.counters.expert_imbalance  # not every output says it

    def work_costs(self, rows: RowTable) -> WorkCosts:
        """What a token costs while as many requests run as now."""
        return WorkCosts(self.costs.prefill_token_s, self.costs.decode_step_s / max(1, rows.num_occupied))

    def snapshot(self, rows: RowTable, waiting: WaitingQueue, kv: KVCacheManager) -> EngineStats:
        """Read everything once. Reads only, and walks no requests, so any thread may call it while the engine runs."""
        counters, costs, pool = self.counters, self.costs, kv.pool
        expected = counters.output_tokens_average
        to_compute, to_generate = waiting.load.outstanding(expected)
        occupied = rows.generation > 0
        # Read in the middle of a step, one counter may be ahead of the other.
        behind = np.maximum(np.minimum(rows.num_tokens, rows.limit) - rows.num_computed, 0)
        room, done = rows.limit + 1 - rows.num_known, rows.num_known - rows.num_prompt
        return EngineStats(
            num_running=rows.num_occupied,
            num_waiting=len(waiting),
            num_paused=self.num_paused,
            num_deferred=waiting.load.num_paused,
            num_blocks=kv.num_blocks,
            num_free_blocks=pool.num_free,
            num_cached_blocks=pool.num_cached,
            outstanding_prefill_tokens=to_compute + int(behind[occupied].sum()),
            outstanding_decode_tokens=to_generate + expected_rest(room[occupied], done[occupied], expected),
            prompt_tokens_total=counters.prompt_tokens,
            generation_tokens_total=counters.generation_tokens,
            preemptions_total=counters.preemptions,
            prefix_cache_queries_total=counters.prefix_cache_queries,
            prefix_cache_hits_total=counters.prefix_cache_hits,
            steps_total=counters.steps,
            iteration_tokens=counters.iteration_tokens,
            prefill_token_s=costs.prefill_token_s,
            decode_step_s=costs.decode_step_s,
            prefill_s_total=costs.prefill_s_total,
            computed_tokens_total=counters.computed_tokens,
            found_tokens_total=counters.found_tokens,
            loaded_tokens_total=counters.loaded_tokens,
            moved_experts_total=counters.moved_experts,
            expert_imbalance=counters.expert_imbalance,
            queued=waiting.queued(self.work_costs(rows), rows.generation.size) if len(waiting) else (),
            begun_rate=waiting.load.begun.rate,
            kv_connector=None if kv.connector is None else kv.connector.stats(),
        )
