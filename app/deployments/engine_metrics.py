"""Feeds an engine replica's metrics from what the engine says about its steps and about itself."""

from __future__ import annotations

import numpy as np

from app.engine.outputs import FinishReason
from app.engine.stats import EngineStats, RequestTimings, StepStats
from app.telemetry.metrics import MetricsRecorder

MAX_REASONS = 10_000

_TIMINGS = (
    ("vllm:request_queue_time_seconds", "queue_s"),
    ("vllm:request_prefill_time_seconds", "prefill_s"),
    ("vllm:request_decode_time_seconds", "decode_s"),
    ("vllm:request_inference_time_seconds", "inference_s"),
)


class EngineMetrics:
    """The engine's StatsRecorder: histograms on the engine's thread, gauges and totals when somebody asks."""

    def __init__(self, recorder: MetricsRecorder) -> None:
        self._recorder = recorder
        self._reasons: dict[str, FinishReason] = {}  # why the ingress ended requests, by request id, oldest first
        self._itl = recorder.histogram("vllm:inter_token_latency_seconds")

    def kv_cache(self, block_size: int, num_blocks: int, max_model_len: int) -> None:
        """The shape of the KV cache, once it is known."""
        num_tokens = block_size * num_blocks
        labels = (block_size, num_blocks, num_tokens, num_tokens / max_model_len)
        self._recorder.set("vllm:cache_config_info", 1, *map(str, labels))

    def ended(self, request_id: str, reason: FinishReason) -> None:
        """The ingress ends a request: it owns the reason (a stop string is a stop, though the engine sees an abort)."""
        if reason == "abort":
            return
        self._reasons[request_id] = reason
        if len(self._reasons) > MAX_REASONS:  # nobody asks for a request that had ended by itself just before
            self._reasons.pop(next(iter(self._reasons)), None)

    def record_step(self, step: StepStats) -> None:
        """See StatsRecorder."""
        if step.num_tokens:
            self._recorder.observe("vllm:iteration_tokens_total", step.num_tokens)
        for seconds in step.ttft_s:
            self._recorder.observe("vllm:time_to_first_token_seconds", max(0.0, seconds))
        self._itl.observe_many(np.asarray(step.itl_s, dtype=np.float64))

    def record_finished(self, timings: RequestTimings) -> None:
        """See StatsRecorder."""
        recorder = self._recorder
        reason = self._reasons.pop(timings.spec.request_id, timings.finish_reason)
        recorder.increment("vllm:request_success_total", 1.0, reason)
        recorder.increment("vllm:prompt_tokens_cached_total", timings.num_cached_tokens)
        recorder.observe("vllm:e2e_request_latency_seconds", max(0.0, timings.e2e_s))
        recorder.observe("vllm:request_prompt_tokens", timings.num_prompt_tokens)
        recorder.observe("vllm:request_generation_tokens", timings.num_generation_tokens)
        recorder.observe("vllm:request_max_num_generation_tokens", timings.max_tokens)
        recorder.observe("vllm:request_params_max_tokens", timings.max_tokens)
        recorder.observe("vllm:request_num_preemptions", timings.num_preemptions)
        if timings.spec.choice_index == 0:  # once a request
            recorder.observe("vllm:request_params_n", timings.spec.num_choices)
        for name, attribute in _TIMINGS:
            seconds = getattr(timings, attribute)
            if seconds is not None:
                recorder.observe(name, max(0.0, seconds))
        if timings.num_generation_tokens > 1 and timings.decode_s is not None:
            per_token_s = timings.decode_s / (timings.num_generation_tokens - 1)
            recorder.observe("vllm:request_time_per_output_token_seconds", max(0.0, per_token_s))

    def snapshot(self, stats: EngineStats) -> bytes:
        """Everything, as of now."""
        recorder = self._recorder
        recorder.set("vllm:num_requests_running", stats.num_running)
        recorder.set("vllm:num_requests_waiting", stats.num_waiting)
        recorder.set("vllm:num_requests_waiting_by_reason", stats.num_waiting - stats.num_deferred, "capacity")
        recorder.set("vllm:num_requests_waiting_by_reason", stats.num_deferred, "deferred")
        recorder.set("manta:num_requests_paused", stats.num_paused)
        recorder.set("manta:outstanding_tokens", stats.outstanding_tokens)
        recorder.set("vllm:kv_cache_usage_perc", stats.kv_cache_usage)
        recorder.set("vllm:num_preemptions_total", stats.preemptions_total)
        recorder.set("vllm:prompt_tokens_total", stats.prompt_tokens_total)
        recorder.set("vllm:generation_tokens_total", stats.generation_tokens_total)
        recorder.set("vllm:prefix_cache_queries_total", stats.prefix_cache_queries_total)
        recorder.set("vllm:prefix_cache_hits_total", stats.prefix_cache_hits_total)
        if (tier := stats.kv_connector) is not None:
            recorder.set("vllm:external_prefix_cache_queries_total", tier.query_tokens_total)
            recorder.set("vllm:external_prefix_cache_hits_total", tier.hit_tokens_total)
            recorder.set("manta:kv_host_usage_perc", tier.usage)
            recorder.set("manta:kv_host_stored_bytes_total", tier.stored_blocks_total * tier.block_bytes)
            recorder.set("manta:kv_host_loaded_bytes_total", tier.loaded_blocks_total * tier.block_bytes)
        return recorder.snapshot()
