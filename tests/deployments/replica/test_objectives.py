"""Service level objectives: which requests attain them, and whose tokens are goodput."""

from __future__ import annotations

from dataclasses import replace

import pytest

from app.config.slo import SloConfig
from app.deployments.replica import objectives
from app.deployments.replica.objectives import Objectives
from app.records.request import EngineRequest
from app.records.sampling_params import SamplingParams
from app.records.stats import RequestTimings
from app.telemetry.metrics_recorder import MetricsRecorder

GOOD = RequestTimings(
    spec=EngineRequest("r", [], SamplingParams()),
    finish_reason="stop",
    num_prompt_tokens=3,
    num_generation_tokens=11,
    num_cached_tokens=0,
    num_preemptions=0,
    num_resumed_tokens=0,
    max_tokens=16,
    e2e_s=2.0,
    ttft_s=0.5,
    queue_s=0.0,
    prefill_s=0.5,
    decode_s=1.0,
    inference_s=1.5,
)  # 0.1 s a token


def judged(
    *requests: RequestTimings, failed: bool = False
) -> tuple[dict[tuple[str, ...], float], float, MetricsRecorder]:
    recorder = MetricsRecorder({"model_name": "m", "engine": "0"})
    judge = Objectives(recorder, SloConfig(ttft_s=0.5, itl_s=0.1))
    for request in requests:
        judge.judge(request, failed=failed)
    judge.publish()
    values = recorder.series().values
    counted = {labels: count for labels, count in values["manta:slo_requests_total"].items() if count}
    return counted, values["manta:goodput_tokens_total"][()], recorder


def test_goodput_is_of_requests_that_met_both() -> None:
    slow_start, slow_tokens = replace(GOOD, ttft_s=0.6), replace(GOOD, decode_s=1.1)
    counts, goodput, recorder = judged(GOOD, slow_start, slow_tokens)
    assert counts == {("ttft", "yes"): 2, ("ttft", "no"): 1, ("itl", "yes"): 2, ("itl", "no"): 1}
    assert goodput == 11
    shares = recorder.series().values["manta:slo_attainment"]
    assert shares == {("ttft",): pytest.approx(2 / 3), ("itl",): pytest.approx(2 / 3)}


def test_what_a_request_says_nothing_about_is_not_judged() -> None:
    one_token = replace(GOOD, num_generation_tokens=1, decode_s=0.0)
    moved_here = replace(GOOD, ttft_s=None, num_resumed_tokens=6)  # 5 tokens in 1 s
    counts, goodput, _ = judged(one_token, moved_here)
    assert counts == {("ttft", "yes"): 1, ("itl", "no"): 1}
    assert goodput == 1


def test_a_failed_request_met_nothing() -> None:
    counts, goodput, _ = judged(GOOD, failed=True)
    assert counts == {("ttft", "no"): 1, ("itl", "no"): 1}
    assert goodput == 0


def test_the_share_is_of_the_last_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objectives, "WINDOW", 4)
    *_, recorder = judged(*[replace(GOOD, ttft_s=9.0)] * 10, *[GOOD] * 3)
    assert recorder.series().values["manta:slo_attainment"][("ttft",)] == 0.75
