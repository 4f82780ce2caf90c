"""The exposition, judged by Prometheus' own parser and client library."""

from __future__ import annotations

import random
import time

import numpy as np
import prometheus_client
import pytest
from prometheus_client.parser import text_string_to_metric_families

from app.telemetry.exposition import render
from app.telemetry.metrics import ITL_S, LABEL_VALUES, METRICS
from app.telemetry.metrics_recorder import MetricsRecorder, decode_snapshot

# The series that vLLM's own dashboards query.
DASHBOARDS = {
    "histogram": (
        "e2e_request_latency_seconds time_to_first_token_seconds inter_token_latency_seconds "
        "request_time_per_output_token_seconds iteration_tokens_total request_prompt_tokens "
        "request_generation_tokens request_queue_time_seconds request_prefill_time_seconds "
        "request_decode_time_seconds request_max_num_generation_tokens"
    ),
    "counter": "prompt_tokens_total generation_tokens_total request_success_total prefix_cache_hits_total "
    "prefix_cache_queries_total num_preemptions_total",
    "gauge": "num_requests_running num_requests_waiting kv_cache_usage_perc",
}


def recorder(engine: str = "0", model: str = "m") -> MetricsRecorder:
    return MetricsRecorder({"model_name": model, "engine": engine})


def parse(*recorders: MetricsRecorder) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    text = render([decode_snapshot(r.snapshot()) for r in recorders])
    return {sample.name: {} for family in text_string_to_metric_families(text) for sample in family.samples} | _samples(
        text
    )


def _samples(text: str) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    found: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, {})[tuple(sorted(sample.labels.items()))] = sample.value
    return found


def test_dashboard_series_exist_with_their_types() -> None:
    kinds = {metric.name: metric.kind for metric in METRICS}
    for kind, names in DASHBOARDS.items():
        for name in names.split():
            assert kinds[f"vllm:{name}"] == kind


def test_names_are_declared_once() -> None:
    names = [metric.name for metric in METRICS]
    assert len(names) == len(set(names))


def test_replicas_are_merged_under_their_labels() -> None:
    first, second = recorder("0"), recorder("1")
    first.increment("vllm:request_success_total", 2, "stop")
    first.increment("vllm:request_success_total", 1, "length")
    second.increment("vllm:request_success_total", 5, "stop")
    second.set("vllm:kv_cache_usage_perc", 0.25)
    samples = parse(first, second)
    success = samples["vllm:request_success_total"]
    assert success[(("engine", "0"), ("finished_reason", "length"), ("model_name", "m"))] == 1
    assert success[(("engine", "1"), ("finished_reason", "stop"), ("model_name", "m"))] == 5
    assert sum(success.values()) == 8
    assert samples["vllm:kv_cache_usage_perc"][(("engine", "1"), ("model_name", "m"))] == 0.25


def test_series_whose_labels_are_known_begin_at_zero() -> None:
    """Prometheus' `increase` does not see the value that a series is born with: four streams that a killed replica lost
    raised no alert."""
    ingress = parse(MetricsRecorder({"ingress": "i"}, scope="ingress"))
    reasons = {dict(labels)["reason"]: value for labels, value in ingress["manta:ingress_migrations_total"].items()}
    assert reasons == {"lost": 0, "moved": 0}
    ended = {dict(labels)["finished_reason"] for labels in parse(recorder())["vllm:request_success_total"]}
    assert ended == set(LABEL_VALUES["finished_reason"])
    assert not parse(recorder()).get("manta:tenant_tokens_total")  # who the tenants are is not known


def test_each_family_is_described_once() -> None:
    text = render([decode_snapshot(recorder(str(i)).snapshot()) for i in range(3)])
    types = [line for line in text.splitlines() if line.startswith("# TYPE")]
    assert len(types) == len(set(types)) == sum("engine" in m.scopes and bool(m.known_series) for m in METRICS)


def test_histogram_equals_the_client_library() -> None:
    draw = random.Random(3)
    values = [draw.expovariate(3) for _ in range(500)] + [0.01, 80.0, 1000.0, 0.0]  # bounds are inclusive
    mine = recorder()
    for value in values[:100]:
        mine.observe("vllm:inter_token_latency_seconds", value)
    mine.histogram("vllm:inter_token_latency_seconds").observe_many(np.array(values[100:]))
    registry = prometheus_client.CollectorRegistry()
    judge = prometheus_client.Histogram("x", "x", buckets=ITL_S, registry=registry)
    for value in values:
        judge.observe(value)
    samples = parse(mine)
    for sample in next(iter(registry.collect())).samples:
        if sample.name == "x_created":
            continue
        name = sample.name.replace("x", "vllm:inter_token_latency_seconds", 1)
        labels = tuple(sorted({**sample.labels, "engine": "0", "model_name": "m"}.items()))
        assert samples[name][labels] == pytest.approx(sample.value)


def test_token_buckets_end_at_the_context() -> None:
    small = MetricsRecorder({"model_name": "m", "engine": "0"}, max_tokens=2048)
    assert max(small.histogram("vllm:request_prompt_tokens").bounds) == 2000


def test_label_values_are_escaped() -> None:
    odd = 'a"b\\c\nd'
    samples = parse(recorder(model=odd))
    ((labels, _),) = samples["vllm:num_requests_running"].items()
    assert dict(labels)["model_name"] == odd


def test_undeclared_name_is_an_error() -> None:
    with pytest.raises(KeyError):
        recorder().increment("vllm:no_such_total")
    with pytest.raises(KeyError):
        recorder().set("manta:ingress_requests", 1)  # not an engine's


def test_nothing_to_render() -> None:
    assert render([]) == ""


def test_the_values_of_each_label_are_known_or_bounded() -> None:
    labels = {label for metric in METRICS for label in metric.labels}
    assert labels == LABEL_VALUES.keys()


def test_histograms_with_labels() -> None:
    mine = recorder()
    mine.observe("manta:step_seconds", 0.003, "wait")
    mine.observe("manta:step_seconds", 0.2, "update")
    samples = parse(mine)
    own = (("engine", "0"), ("model_name", "m"))
    assert samples["manta:step_seconds_count"] == {(*own, ("phase", "wait")): 1, (*own, ("phase", "update")): 1}
    wait = {key: value for key, value in samples["manta:step_seconds_bucket"].items() if ("phase", "wait") in key}
    assert {dict(key)["le"]: value for key, value in wait.items()}["0.005"] == 1


def test_every_process_says_when_it_began() -> None:
    for scope in ("engine", "ingress", "router"):
        began = MetricsRecorder({"x": "y"}, scope=scope).series().values["process_start_time_seconds"][()]
        assert 0 < time.time() - began < 7 * 86400
