"""Feeds an engine replica's metrics from what the engine says about its steps and about itself."""

from __future__ import annotations

import numpy as np

from app.deployments.objectives import Objectives
from app.engine.kv_cache.block_residency import ResidencySamples
from app.engine.kv_connector.base import ConnectorStats
from app.engine.outputs import FinishReason
from app.engine.stats import EngineStats, RequestTimings, StepStats
from app.slo_config import SloConfig
from app.telemetry.metrics import MetricsRecorder, Snapshot
from app.telemetry.tenant_tokens import TenantTokens

MAX_REASONS = 10_000

SLEEP_STATES = ("awake", "weights_offloaded", "discard_all")  # by vLLM's level of sleep

_TIMINGS = (
    ("vllm:request_queue_time_seconds", "queue_s"),
    ("vllm:request_prefill_time_seconds", "prefill_s"),
    ("vllm:request_decode_time_seconds", "decode_s"),
    ("vllm:request_inference_time_seconds", "inference_s"),
)


class EngineMetrics:
    """The engine's StatsRecorder: histograms on the engine's thread, gauges and totals when somebody asks."""

    def __init__(self, recorder: MetricsRecorder, slo: SloConfig | None = None) -> None:
        self._recorder = recorder
        self._objectives = Objectives(recorder, slo or SloConfig())
        self._tenants = TenantTokens()
        self._reasons: dict[str, FinishReason] = {}  # why the ingress ended requests, by request id, oldest first
        self._itl = recorder.histogram("vllm:inter_token_latency_seconds")
        phases = ("schedule", "wait", "update", "device")
        self._phases = [recorder.histogram("manta:step_seconds", phase) for phase in phases]

    def kv_cache(self, block_size: int, num_blocks: int, num_tokens: int, max_model_len: int) -> None:
        """The shape of the KV cache, once it is known: `num_tokens` in requests of max_model_len tokens."""
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
        if step.step_time_s > 0:
            self._phases[3].observe(step.step_time_s)
        if step.residency is not None:
            self._record_residency(step.residency)

    def record_phases(self, schedule_s: float, wait_s: float, update_s: float) -> None:
        """See StatsRecorder."""
        schedule, wait, update, _ = self._phases
        schedule.observe(schedule_s)
        wait.observe(wait_s)
        update.observe(update_s)

    def _record_residency(self, samples: ResidencySamples) -> None:
        for name, seconds in (
            ("vllm:kv_block_lifetime_seconds", samples.lifetime_s),
            ("vllm:kv_block_idle_before_evict_seconds", samples.idle_s),
            ("vllm:kv_block_reuse_gap_seconds", samples.reuse_gap_s),
        ):
            for value in seconds:
                self._recorder.observe(name, value)

    def record_finished(self, timings: RequestTimings) -> None:
        """See StatsRecorder."""
        recorder = self._recorder
        reason = self._reasons.pop(timings.spec.request_id, timings.finish_reason)
        recorder.increment("vllm:request_success_total", 1.0, reason)
        recorder.observe("vllm:e2e_request_latency_seconds", max(0.0, timings.e2e_s))
        recorder.observe("vllm:request_prompt_tokens", timings.num_prompt_tokens)
        recorder.observe("vllm:request_generation_tokens", timings.num_generation_tokens)
        recorder.observe("vllm:request_max_num_generation_tokens", timings.max_tokens)
        recorder.observe("vllm:request_params_max_tokens", timings.max_tokens)
        recorder.observe("vllm:request_num_preemptions", timings.num_preemptions)
        if not timings.num_resumed_tokens:
            computed = timings.num_prompt_tokens - timings.num_cached_tokens
            recorder.observe("vllm:request_prefill_kv_computed_tokens", computed)
        if timings.spec.choice_index == 0:  # once a request
            recorder.observe("vllm:request_params_n", timings.spec.num_choices)
        for name, attribute in _TIMINGS:
            seconds = getattr(timings, attribute)
            if seconds is not None:
                recorder.observe(name, max(0.0, seconds))
        if (per_token_s := timings.per_token_s) is not None:
            recorder.observe("vllm:request_time_per_output_token_seconds", max(0.0, per_token_s))
        self._count_tokens(timings)
        if reason != "abort":  # whose client left says nothing about the service
            self._objectives.judge(timings, failed=reason == "error")

    def _count_tokens(self, timings: RequestTimings) -> None:
        num_prompt_tokens = 0 if timings.num_resumed_tokens else timings.num_prompt_tokens
        self._tenants.add(timings.spec.placement.tenant, num_prompt_tokens, timings.num_own_tokens)

    @property
    def labels(self) -> dict[str, str]:
        """What tells this replica's series apart."""
        return self._recorder.labels

    def snapshot(self, stats: EngineStats, canary_age_s: float = 0.0) -> bytes:
        """Everything, as of now."""
        self.refresh(stats, canary_age_s)
        return self._recorder.snapshot()

    def refresh(self, stats: EngineStats, canary_age_s: float = 0.0) -> Snapshot:
        """Set gauges and totals as of now; all series."""
        recorder = self._recorder
        recorder.set("vllm:num_requests_running", stats.num_running)
        recorder.set("vllm:num_requests_waiting", stats.num_waiting)
        recorder.set("vllm:num_requests_waiting_by_reason", stats.num_waiting - stats.num_deferred, "capacity")
        recorder.set("vllm:num_requests_waiting_by_reason", stats.num_deferred, "deferred")
        recorder.set("manta:num_requests_paused", stats.num_paused)
        recorder.set("manta:canary_age_seconds", canary_age_s)
        recorder.set("manta:outstanding_tokens", stats.outstanding_tokens)
        recorder.set("vllm:kv_cache_usage_perc", stats.kv_cache_usage)
        recorder.set("vllm:num_preemptions_total", stats.preemptions_total)
        recorder.set("manta:experts_moved_total", stats.moved_experts_total)
        recorder.set("manta:expert_imbalance", stats.expert_imbalance)
        recorder.set("vllm:prompt_tokens_total", stats.prompt_tokens_total)
        recorder.set("vllm:prompt_tokens_cached_total", stats.found_tokens_total + stats.loaded_tokens_total)
        recorder.set("vllm:prompt_tokens_by_source_total", stats.computed_tokens_total, "local_compute")
        recorder.set("vllm:prompt_tokens_by_source_total", stats.found_tokens_total, "local_cache_hit")
        recorder.set("vllm:prompt_tokens_by_source_total", stats.loaded_tokens_total, "external_kv_transfer")
        recorder.set("vllm:generation_tokens_total", stats.generation_tokens_total)
        recorder.set("vllm:prefix_cache_queries_total", stats.prefix_cache_queries_total)
        recorder.set("vllm:prefix_cache_hits_total", stats.prefix_cache_hits_total)
        for level, state in enumerate(SLEEP_STATES):
            recorder.set("vllm:engine_sleep_state", float(level == stats.sleep_level), state)
        recorder.replace("manta:tenant_tokens_total", self._tenants.series)
        self._objectives.publish()
        if stats.kv_connector is not None:
            self._set_tier(stats.kv_connector)
        return recorder.series()

    def _set_tier(self, tier: ConnectorStats) -> None:
        recorder = self._recorder
        recorder.set("vllm:external_prefix_cache_queries_total", tier.query_tokens_total)
        recorder.set("vllm:external_prefix_cache_hits_total", tier.hit_tokens_total)
        for name in ("manta:kv_host_usage_perc", "vllm:kv_offload_cpu_cache_usage_perc"):
            recorder.set(name, tier.usage)
        for name in ("manta:kv_host_stored_bytes_total", "vllm:kv_offload_store_bytes_total"):
            recorder.set(name, tier.stored_blocks_total * tier.block_bytes)
        for name in ("manta:kv_host_loaded_bytes_total", "vllm:kv_offload_load_bytes_total"):
            recorder.set(name, tier.loaded_blocks_total * tier.block_bytes)
