"""What an engine replica's metrics say about itself and the ends of requests."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from app.deployments import engine_metrics
from app.deployments.engine_metrics import EngineMetrics
from app.engine.outputs import FinishReason
from app.engine.request import EngineRequest
from app.engine.sampling_params import SamplingParams
from app.engine.stats import EngineStats, RequestTimings
from app.telemetry.metrics import MetricsRecorder, decode_snapshot, render


def timings(request_id: str, reason: FinishReason) -> RequestTimings:
    return RequestTimings(
        spec=EngineRequest(request_id, [], SamplingParams()),
        finish_reason=reason,
        num_prompt_tokens=3,
        num_generation_tokens=5,
        num_cached_tokens=0,
        num_preemptions=0,
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
    return EngineStats(**{**zeros, "num_blocks": 1, "kv_connector": None, **changed})


def test_why_requests_wait() -> None:
    """Under the names and reasons of vLLM's own metric; the reasons add up to all that wait."""
    metrics = EngineMetrics(MetricsRecorder({"model_name": "m", "engine": "0"}))
    values = decode_snapshot(metrics.snapshot(stats(num_waiting=5, num_deferred=2))).values
    assert values["vllm:num_requests_waiting_by_reason"] == {("capacity",): 3.0, ("deferred",): 2.0}
    assert values["vllm:num_requests_waiting"] == {(): 5.0}


def test_the_shape_of_the_kv_cache() -> None:
    recorder = MetricsRecorder({"model_name": "m", "engine": "0"})
    EngineMetrics(recorder).kv_cache(block_size=16, num_blocks=100, max_model_len=640)
    (family,) = [f for f in families(recorder) if f.name == "vllm:cache_config_info"]
    (sample,) = family.samples
    assert sample.value == 1
    shape = {"block_size": "16", "num_gpu_blocks": "100"}
    shape |= {"kv_cache_size_tokens": "1600", "kv_cache_max_concurrency": "2.5"}
    assert sample.labels == {"model_name": "m", "engine": "0", **shape}


def families(recorder: MetricsRecorder) -> list[Metric]:
    return list(text_string_to_metric_families(render([decode_snapshot(recorder.snapshot())])))


def ends(recorder: MetricsRecorder) -> dict[tuple[str, ...], float]:
    return decode_snapshot(recorder.snapshot()).values["vllm:request_success_total"]


def test_the_ingress_owns_the_reason() -> None:
    """The engine sees an abort where the ingress found a stop string."""
    recorder = MetricsRecorder({"model_name": "m", "engine": "0"})
    metrics = EngineMetrics(recorder)
    metrics.ended("stopped", "stop")
    metrics.ended("left", "abort")
    for request_id, reason in (("stopped", "abort"), ("left", "abort"), ("full", "length")):
        metrics.record_finished(timings(request_id, reason))  # type: ignore[arg-type]
    assert ends(recorder) == {("stop",): 1.0, ("abort",): 1.0, ("length",): 1.0}


def test_reasons_that_came_too_late_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """An abort may cross a request's own end: then its reason is never asked for."""
    monkeypatch.setattr(engine_metrics, "MAX_REASONS", 8)
    recorder = MetricsRecorder({"model_name": "m", "engine": "0"})
    metrics = EngineMetrics(recorder)
    for i in range(100):
        metrics.ended(f"r{i}", "stop")
    assert len(metrics._reasons) == 8
    metrics.record_finished(timings("r99", "abort"))
    metrics.record_finished(timings("r0", "abort"))
    assert ends(recorder) == {("stop",): 1.0, ("abort",): 1.0}
