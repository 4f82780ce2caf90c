"""What the scheduler counts, and its state as one EngineStats for the load book and the gauges."""

from __future__ import annotations

import numpy as np

from app.engine.kv_cache.kv_cache_manager import KVCacheManager
from app.engine.outputs import FinishReason
from app.engine.request import Request
from app.engine.scheduler.row_table import RowTable
from app.engine.scheduler.waiting_queue import WaitingQueue
from app.engine.stats import EngineCounters, EngineStats, RequestTimings, StatsRecorder, StepCosts, StepStats


class Statistics:
    """Counts as things happen and passes them on to the recorder, if there is one."""

    def __init__(self, recorder: StatsRecorder | None) -> None:
        self.counters = EngineCounters()
        self.costs = StepCosts()
        self._recorder = recorder

    def request_started(self, request: Request, num_cached_tokens: int) -> None:
        """A request was scheduled for the first time, with this many tokens found in the prefix cache."""
        self.counters.prefix_cache_queries += request.num_tokens
        self.counters.prefix_cache_hits += num_cached_tokens

    def request_preempted(self) -> None:
        """A request lost its row."""
        self.counters.preemptions += 1

    def request_finished(self, request: Request, reason: FinishReason, now: float) -> None:
        """A request ended at `now`."""
        self.counters.request_finished(reason, request.num_output_tokens)
        if self._recorder is not None:
            self._recorder.record_finished(RequestTimings.of(request, reason, now))

    def step_returned(self, step: StepStats, num_decodes: int) -> None:
        """A step's output was taken in."""
        counters = self.counters
        counters.steps += 1
        counters.iteration_tokens = step.num_tokens
        counters.generation_tokens += step.num_generation_tokens
        counters.prompt_tokens += step.num_prompt_tokens
        self.costs.observe(step.num_tokens - num_decodes, num_decodes, step.step_time_s)
        if self._recorder is not None:
            self._recorder.record_step(step)

    def snapshot(self, rows: RowTable, waiting: WaitingQueue, kv: KVCacheManager) -> EngineStats:
        """Read everything once. Reads only, and walks no live dict, so any thread may call it while the engine runs."""
        counters, costs, pool = self.counters, self.costs, kv.pool
        running, queued = rows.occupants(), list(waiting)
        # Read in the middle of a step, one counter may be ahead of the other.
        behind = np.maximum(np.minimum(rows.num_tokens, rows.limit) - rows.num_computed, 0)
        expected = counters.output_tokens_average
        return EngineStats(
            num_running=len(running),
            num_waiting=len(queued),
            num_paused=sum(request.paused for request in running + queued),
            num_blocks=pool.num_blocks,
            num_free_blocks=pool.num_free,
            num_cached_blocks=pool.num_cached,
            outstanding_prefill_tokens=sum(r.num_tokens - kv.num_known_tokens(r) for r in queued)
            + int(behind[rows.ticket > 0].sum()),
            outstanding_decode_tokens=sum(_expected_rest(request, expected) for request in running + queued),
            prompt_tokens_total=counters.prompt_tokens,
            generation_tokens_total=counters.generation_tokens,
            preemptions_total=counters.preemptions,
            prefix_cache_queries_total=counters.prefix_cache_queries,
            prefix_cache_hits_total=counters.prefix_cache_hits,
            steps_total=counters.steps,
            iteration_tokens=counters.iteration_tokens,
            finished_total=dict(counters.finished),
            prefill_token_s=costs.prefill_token_s,
            decode_step_s=costs.decode_step_s,
            kv_connector=None if kv.connector is None else kv.connector.stats(),
        )


def _expected_rest(request: Request, expected_output_tokens: float) -> int:
    """Output tokens still to come: up to the usual length of an answer, never past the request's own limit."""
    done = request.num_output_tokens
    return min(request.max_total_tokens - request.num_tokens, max(1, round(expected_output_tokens) - done))
