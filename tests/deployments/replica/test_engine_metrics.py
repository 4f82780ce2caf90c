"""What an engine replica's metrics say about itself and the ends of requests."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from app.deployments.replica import engine_metrics
from app.deployments.replica.canary import GENERATE_ONE
from app.deployments.replica.engine_metrics import EngineMetrics
from app.engine.core import EngineCore
from app.records.adapter import NO_ADAPTERS, AdapterState
from app.records.outputs import FinishReason
from app.records.request import CANARY_TENANT, EngineRequest, Placement
from app.records.sampling_params import SamplingParams
from app.records.stats import EngineStats, RequestTimings
from app.telemetry.exposition import render
from app.telemetry.metrics_recorder import MetricsRecorder, decode_snapshot
from app.telemetry.tenant_tokens import TenantLabels
from tests.engine.core_driver import make_core, make_request

LABELS = TenantLabels(b"secret")


def timings(request_id: str, reason: FinishReason) -> RequestTimings:
    return RequestTimings(
        spec=EngineRequest(request_id, [], SamplingParams()),
        finish_reason=reason,
        num_prompt_tokens=3,
        num_generation_tokens=5,
        num_cached_tokens=0,
        num_preemptions=0,
        num_resumed_tokens=0,
        max_tokens=16,
        e2e_s=1.0,
        ttft_s=0.1,
        queue_s=0.01,
        prefill_s=0.09,
        decode_s=0.8,
        inference_s=0.9,
    )


def stats(**changed: Any) -> EngineStats:
    """The statistics of an engine that has done nothing yet, but for what is `changed`."""
    zeros: dict[str, Any] = {f.name: 0 for f in fields(EngineStats)}
    return EngineStats(**{**zeros, "num_blocks": 1, "figures": {}, "adapters": NO_ADAPTERS, **changed})


def test_why_requests_wait() -> None:
    """Under the names and reasons of vLLM's own metric; the reasons add up to all that wait."""
    metrics = EngineMetrics(MetricsRecorder({"model_name": "m", "engine": "0"}))
    values = decode_snapshot(metrics.snapshot(stats(num_waiting=5, num_deferred=2))).values
    assert values["vllm:num_requests_waiting_by_reason"] == {("capacity",): 3.0, ("deferred",): 2.0}
    assert values["vllm:num_requests_waiting"] == {(): 5.0}


def run_all(core: EngineCore, request: EngineRequest) -> int:
    """Steps until the request has ended."""
    core.add_request(request)
    num_steps = 0
    while core.has_work():
        core.step()
        num_steps += 1
    return num_steps


def test_prompt_tokens_by_source_add_up() -> None:
    """The second request finds two of the three blocks of the first, which were full; the last token is computed."""
    metrics = EngineMetrics(MetricsRecorder({"model_name": "m", "engine": "0"}))
    metrics.label_tenants(LABELS)
    core = make_core(recorder=metrics)
    prompt = list(range(1, 13))
    num_steps = sum(run_all(core, make_request(name, prompt, max_tokens=3)) for name in ("a", "b"))
    series = metrics.refresh(core.stats())
    values = series.values
    by_source = values["vllm:prompt_tokens_by_source_total"]
    assert by_source == {("local_compute",): 16, ("local_cache_hit",): 8, ("external_kv_transfer",): 0}
    assert sum(by_source.values()) == values["vllm:prompt_tokens_total"][()]
    assert values["vllm:prompt_tokens_cached_total"][()] == 8
    assert series.histograms["vllm:request_prefill_kv_computed_tokens"][()].sum == 16
    label = LABELS.of("")
    assert values["manta:tenant_tokens_total"] == {(label, "prompt"): 24, (label, "output"): 6}
    phases = series.histograms["manta:step_seconds"]
    assert [phases[(phase,)].count for phase in ("schedule", "wait", "update")] == [num_steps] * 3


def test_canaries_count_in_nothing_but_steps() -> None:
    metrics = EngineMetrics(MetricsRecorder({"model_name": "m", "engine": "0"}))
    core = make_core(recorder=metrics)
    run_all(core, make_request("a", [1, 2, 3], max_tokens=3))

    def counted() -> Any:
        told = decode_snapshot(metrics.snapshot(core.stats()))
        requests = {name: one for name, one in told.histograms.items() if name not in OF_STEPS}
        return told.values, {name: [h.count for h in one.values()] for name, one in requests.items()}

    before = counted()
    own = Placement(tenant=CANARY_TENANT)
    assert run_all(core, EngineRequest("canary-1", [0], GENERATE_ONE, placement=own)) > 0
    assert counted() == before


OF_STEPS = ("manta:step_seconds", "vllm:iteration_tokens_total")


def test_the_state_of_sleep() -> None:
    metrics = EngineMetrics(MetricsRecorder({"model_name": "m", "engine": "0"}))
    for level, state in enumerate(("awake", "weights_offloaded", "discard_all")):
        told = metrics.refresh(stats(sleep_level=level)).values["vllm:engine_sleep_state"]
        assert [name for (name,), value in told.items() if value] == [state]
        assert len(told) == 3


def test_the_shape_of_the_kv_cache() -> None:
    recorder = MetricsRecorder({"model_name": "m", "engine": "0"})
    EngineMetrics(recorder).kv_cache(block_size=16, num_blocks=100, num_tokens=1600, max_model_len=640)
    (family,) = [f for f in families(recorder) if f.name == "vllm:cache_config_info"]
    (sample,) = family.samples
    assert sample.value == 1
    shape = {"block_size": "16", "num_gpu_blocks": "100"}
    shape |= {"kv_cache_size_tokens": "1600", "kv_cache_max_concurrency": "2.5"}
    assert sample.labels == {"model_name": "m", "engine": "0", **shape}


def families(recorder: MetricsRecorder) -> list[Metric]:
    return list(text_string_to_metric_families(render([decode_snapshot(recorder.snapshot())])))


def ends(recorder: MetricsRecorder) -> dict[tuple[str, ...], float]:
    counts = decode_snapshot(recorder.snapshot()).values["vllm:request_success_total"]
    return {labels: count for labels, count in counts.items() if count}


def test_the_ingress_owns_the_reason() -> None:
    """The engine sees an abort where the ingress found a stop string."""
    recorder = MetricsRecorder({"model_name": "m", "engine": "0"})
    metrics = EngineMetrics(recorder)
    metrics.note_end("stopped", "stop")
    metrics.note_end("left", "abort")
    for request_id, reason in (("stopped", "abort"), ("left", "abort"), ("full", "length")):
        metrics.record_finished(timings(request_id, reason))  # type: ignore[arg-type]
    assert ends(recorder) == {("stop",): 1.0, ("abort",): 1.0, ("length",): 1.0}


def test_reasons_that_came_too_late_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """An abort may cross a request's own end: then its reason is never asked for."""
    monkeypatch.setattr(engine_metrics, "MAX_REASONS", 8)
    recorder = MetricsRecorder({"model_name": "m", "engine": "0"})
    metrics = EngineMetrics(recorder)
    for i in range(100):
        metrics.note_end(f"r{i}", "stop")
    assert len(metrics._reasons) == 8
    metrics.record_finished(timings("r99", "abort"))
    metrics.record_finished(timings("r0", "abort"))
    assert ends(recorder) == {("stop",): 1.0, ("abort",): 1.0}


def test_the_adapters_of_requests_are_told_by_name() -> None:
    """As vLLM's: one series, whose labels are lists, and whose value is when that was so."""
    metrics = EngineMetrics(MetricsRecorder({"model_name": "m", "engine": "0"}))
    assert not metrics.refresh(stats()).values.get("vllm:lora_requests_info")
    for running in (("a", "b"), ()):
        told = AdapterState(num_slots=4, running_names=running, waiting_names=("c",))
        series = metrics.refresh(stats(adapters=told)).values["vllm:lora_requests_info"]
        assert list(series) == [("4", "c", ",".join(running))]
        assert next(iter(series.values())) > 1.7e9
