"""Copies an engine's metrics to Ray's own metrics agent, for the Serve LLM board of Ray's dashboard.

The board reads vLLM's names with `ray_vllm_` in front and tells engines apart by `WorkerId`, both of which Ray adds.
Everything is a gauge with the exact name, the parts of histograms too: Ray would change a counter's name and could only
be told each value of a histogram, not its state. PromQL does not mind.
"""

from __future__ import annotations

from collections.abc import Iterator

from ray.util.metrics import Gauge

from app.telemetry.exposition import cumulative
from app.telemetry.metrics import METRICS, Metric
from app.telemetry.metrics_recorder import Histogram, Snapshot

SCALARS = (
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "vllm:num_preemptions_total",
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
    "vllm:request_success_total",
    "vllm:prefix_cache_queries_total",
    "vllm:prefix_cache_hits_total",
    "vllm:external_prefix_cache_queries_total",
    "vllm:external_prefix_cache_hits_total",
    "vllm:kv_offload_cpu_cache_usage_perc",
    "vllm:kv_offload_store_bytes_total",
    "vllm:kv_offload_load_bytes_total",
    "vllm:engine_sleep_state",
    "manta:num_requests_paused",
    "manta:outstanding_tokens",
    "manta:slo_attainment",
    "manta:goodput_tokens_total",
    "manta:canary_age_seconds",
)
SUMS = (
    "vllm:request_queue_time_seconds",
    "vllm:request_prefill_time_seconds",
    "vllm:request_decode_time_seconds",
)
HISTOGRAMS = (
    "vllm:time_to_first_token_seconds",
    "vllm:request_time_per_output_token_seconds",
    "vllm:e2e_request_latency_seconds",
    "vllm:request_prompt_tokens",
    "vllm:request_generation_tokens",
)

Sample = tuple[str, tuple[str, ...], tuple[str, ...], float]  # name, names of labels, their values, value


class RayMirror:
    """One engine's; `publish` costs 2 us for each sample that has changed since the last time."""

    def __init__(self, labels: dict[str, str]) -> None:
        self._labels = labels
        self._declared = {metric.name: metric for metric in METRICS}
        self._gauges: dict[str, Gauge] = {}
        self._last: dict[tuple[str, tuple[str, ...]], float] = {}

    def publish(self, snapshot: Snapshot) -> None:
        """Hand on what `snapshot` holds."""
        for name, keys, values, value in self._samples(snapshot):
            if self._last.get((name, values)) != value:
                self._last[name, values] = value
                self._gauge(name, keys).set(value, dict(zip(keys, values, strict=True)))

    def _samples(self, snapshot: Snapshot) -> Iterator[Sample]:
        for name in SCALARS:
            for values, value in list(snapshot.values.get(name, {}).items()):
                yield name, self._declared[name].labels, values, value
        for name in (*SUMS, *HISTOGRAMS):
            yield from _parts(self._declared[name], snapshot.histograms[name][()])

    def _gauge(self, name: str, keys: tuple[str, ...]) -> Gauge:
        gauge = self._gauges.get(name)
        if gauge is None:
            metric = self._declared.get(name.removesuffix("_bucket").removesuffix("_sum").removesuffix("_count"))
            text = metric.help if metric is not None else self._declared[name].help
            gauge = self._gauges[name] = Gauge(name.replace(":", "_"), text, (*self._labels, *keys))
            gauge.set_default_tags(self._labels)
        return gauge


def _parts(metric: Metric, histogram: Histogram) -> Iterator[Sample]:
    yield f"{metric.name}_sum", (), (), histogram.sum
    if metric.name in SUMS:
        return
    yield f"{metric.name}_count", (), (), float(histogram.count)
    for bound, count in cumulative(histogram):
        yield f"{metric.name}_bucket", ("le",), (bound,), float(count)
