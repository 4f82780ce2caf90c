"""What an engine replica's metrics say about the ends of requests."""

from __future__ import annotations

import pytest

from app.deployments import engine_metrics
from app.deployments.engine_metrics import EngineMetrics
from app.engine.outputs import FinishReason
from app.engine.stats import RequestTimings
from app.telemetry.metrics import MetricsRecorder, decode_snapshot


def timings(request_id: str, reason: FinishReason) -> RequestTimings:
    return RequestTimings(
        request_id=request_id,
        finish_reason=reason,
        num_prompt_tokens=3,
        num_generation_tokens=5,
        num_cached_tokens=0,
        num_preemptions=0,
        max_tokens=16,
        n=1,
        choice_index=0,
        e2e_s=1.0,
        ttft_s=0.1,
        queue_s=0.01,
        prefill_s=0.09,
        decode_s=0.8,
        inference_s=0.9,
    )


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
