"""Feeds an engine replica's metrics from what the engine says about its steps and about itself."""

from __future__ import annotations

import time

import numpy as np

from app.config.slo import SloConfig
from app.deployments.replica.objectives import Objectives
from app.records.outputs import FinishReason
from app.records.stats import EngineStats, RequestTimings, StepStats
from app.telemetry.metrics import METRICS
from app.telemetry.metrics_recorder import Histogram, MetricsRecorder, Snapshot
from app.telemetry.tenant_tokens import TenantLabels, TenantTokens

MAX_REASONS = 10_000

SLEEP_STATES = ("awake", "weights_offloaded", "discard_all")  # by vLLM's level of sleep


class EngineMetrics:
    """The engine's StatsRecorder: histograms on the engine's thread, gauges and totals when somebody asks."""

    def __init__(self, recorder: MetricsRecorder, slo: SloConfig | None = None) -> None:
        self._recorder = recorder
        self._objectives = Objectives(recorder, slo or SloConfig())
        self._tenants = TenantTokens(TenantLabels())
        self._reasons: dict[str, FinishReason] = {}  # why the ingress ended requests, by request id, oldest first
        self._of_steps = _histograms(recorder, "step")
        self._of_requests = _histograms(recorder, "request")
        self._phases = [recorder.histogram("manta:step_seconds", phase) for phase in ("schedule", "wait", "update")]

    def label_tenants(self, labels: TenantLabels) -> None:
        """Count by these labels, from the engine's start on."""
        self._tenants = TenantTokens(labels)

    def kv_cache(self, block_size: int, num_blocks: int, num_tokens: int, max_model_len: int) -> None:
        """The shape of the KV cache, once it is known: `num_tokens` in requests of max_model_len tokens."""
        labels = (block_size, num_blocks, num_tokens, num_tokens / max_model_len)
        self._recorder.set("vllm:cache_config_info", 1, *map(str, labels))

    def note_end(self, request_id: str, reason: FinishReason) -> None:
        """Note why the ingress ends a request: a stop string is a stop, though the engine sees an abort."""
        if reason == "abort":
            return
        self._reasons[request_id] = reason
        if len(self._reasons) > MAX_REASONS:  # nobody asks for a request that had ended by itself just before
            self._reasons.pop(next(iter(self._reasons)), None)

    def record_step(self, step: StepStats) -> None:
        """See StatsRecorder."""
        for name, histogram in self._of_steps:
            values = step.measured[name] if name in step.measured else getattr(step, name, ())
            if not isinstance(values, int | float):
                histogram.observe_many(np.maximum(np.asarray(values, np.float64), 0.0))
            elif values > 0:  # a flush computes nothing, and not every worker measures its time
                histogram.observe(values)

    def record_phases(self, schedule_s: float, wait_s: float, update_s: float) -> None:
        """See StatsRecorder."""
        for histogram, seconds in zip(self._phases, (schedule_s, wait_s, update_s), strict=True):
            histogram.observe(seconds)

    def record_finished(self, timings: RequestTimings) -> None:
        """See StatsRecorder."""
        reason = self._reasons.pop(timings.spec.request_id, timings.finish_reason)
        self._recorder.increment("vllm:request_success_total", 1.0, reason)
        for name, histogram in self._of_requests:
            if (value := getattr(timings, name)) is not None:
                histogram.observe(max(0.0, value))
        self._count_tokens(timings)
        if reason != "abort":  # whose client left says nothing about the service
            self._objectives.judge(timings, failed=reason == "error")

    def _count_tokens(self, timings: RequestTimings) -> None:
        num_prompt_tokens = 0 if timings.num_resumed_tokens else timings.num_prompt_tokens
        self._tenants.add(timings.spec.placement.tenant, num_prompt_tokens, timings.num_own_tokens)

    @property
    def labels(self) -> dict[str, str]:
        """Returns what tells this replica's series apart."""
        return self._recorder.labels

    def snapshot(self, stats: EngineStats, canary_age_s: float = 0.0) -> bytes:
        """Everything, as of now."""
        self.refresh(stats, canary_age_s)
        return self._recorder.snapshot()

    def refresh(self, stats: EngineStats, canary_age_s: float = 0.0) -> Snapshot:
        """Set gauges and totals as of now; all series."""
        recorder = self._recorder
        recorder.set("manta:canary_age_seconds", canary_age_s)
        for metric in METRICS:
            for labels, source, name in metric.sources:
                if source == "stats":
                    recorder.set(metric.name, getattr(stats, name), *labels)
                elif source == "figures" and name in stats.figures:
                    recorder.set(metric.name, stats.figures[name], *labels)
        for level, state in enumerate(SLEEP_STATES):
            recorder.set("vllm:engine_sleep_state", float(level == stats.sleep_level), state)
        if (adapters := stats.adapters).num_slots:
            waiting, running = ",".join(adapters.waiting_names), ",".join(adapters.running_names)
            recorder.replace("vllm:lora_requests_info", {(str(adapters.num_slots), waiting, running): time.time()})
        recorder.replace("manta:tenant_tokens_total", self._tenants.series)
        self._objectives.publish()
        return recorder.series()


def _histograms(recorder: MetricsRecorder, source: str) -> list[tuple[str, Histogram]]:
    """The histograms that read from `source`, each with the name of what it reads."""
    return [
        (name, recorder.histogram(metric.name, *labels))
        for metric in METRICS
        for labels, found, name in metric.sources
        if found == source
    ]
