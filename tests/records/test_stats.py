"""Counters, snapshots and timings agree with what happened."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from app.records.request import EngineRequest
from app.records.request_state import Request
from app.records.sampling_params import SamplingParams
from app.records.stats import OutputLengths, RequestTimings, StepCosts, StepStats
from tests.engine.core_driver import make_core, make_request, run


class Recorder:
    def __init__(self) -> None:
        self.steps: list[StepStats] = []
        self.finished: list[RequestTimings] = []

    def record_step(self, step: StepStats) -> None:
        self.steps.append(step)

    def record_finished(self, timings: RequestTimings) -> None:
        self.finished.append(timings)

    def record_phases(self, schedule_s: float, wait_s: float, update_s: float) -> None:
        """Nobody asks."""


@pytest.mark.parametrize("num_blocks", [24, 500])
def test_totals(num_blocks: int) -> None:
    recorder = Recorder()
    core = make_core(num_blocks=num_blocks, recorder=recorder)
    requests = [make_request(f"r{i}", list(range(i, i + 20)), max_tokens=30) for i in range(5)]
    run(core, requests)
    core.add_request(make_request("gone", [1]))
    core.abort_requests(["gone"])
    run(core)
    stats = core.stats()
    assert stats.figures["prompt_tokens"] == 100
    assert stats.figures["generation_tokens"] == 150
    assert stats.steps_total == len(recorder.steps)
    assert (stats.num_running, stats.num_waiting, stats.num_paused) == (0, 0, 0)
    assert (stats.outstanding_tokens, stats.kv_cache_usage) == (0, 0.0)
    assert (stats.figures["preemptions"] > 0) == (num_blocks == 24)
    # Each token is the first of its request, or has a time since the one before; preemption may hide a few.
    intervals = sum(len(step.itl_s) for step in recorder.steps)
    assert sum(len(step.ttft_s) for step in recorder.steps) == 5
    if num_blocks == 500:
        assert intervals == 145
    assert all((step.itl_s >= 0).all() for step in recorder.steps)
    assert sum(step.num_generation_tokens for step in recorder.steps) == 150
    assert sum(step.num_prompt_tokens for step in recorder.steps) == 100


def test_timings_add_up() -> None:
    recorder = Recorder()
    run(make_core(recorder=recorder), [make_request("r", [1, 2, 3], max_tokens=9)])
    (timings,) = recorder.finished
    assert (timings.num_prompt_tokens, timings.num_generation_tokens, timings.max_tokens) == (3, 9, 9)
    assert (timings.spec.num_choices, timings.spec.choice_index, timings.finish_reason) == (1, 0, "length")
    assert timings.queue_s is not None
    assert timings.prefill_s is not None
    assert timings.decode_s is not None
    assert timings.inference_s == pytest.approx(timings.prefill_s + timings.decode_s)
    assert timings.ttft_s is not None
    assert timings.ttft_s >= timings.queue_s + timings.prefill_s - 1e-6
    assert timings.e2e_s >= timings.ttft_s + timings.decode_s - 1e-6


def test_timings_of_a_request_that_never_ran() -> None:
    request = Request(EngineRequest("r", [], SamplingParams(n=3), 2), [1], 1, 9, (), frozenset(), b"", arrival=5.0)
    timings = RequestTimings.of(request, "abort", 7.0)
    assert (timings.e2e_s, timings.ttft_s, timings.queue_s, timings.inference_s) == (2.0, None, None, None)
    assert (timings.spec.num_choices, timings.spec.choice_index) == (3, 2)


def test_outstanding_work_is_what_is_left() -> None:
    core = make_core(num_blocks=1000, max_num_batched_tokens=32, max_num_seqs=2, max_inflight_steps=1)
    for i in range(3):
        core.add_request(make_request(f"r{i}", [i] * 100, max_tokens=4))
    stats = core.stats()
    assert (stats.num_waiting, stats.outstanding_prefill_tokens, stats.outstanding_decode_tokens) == (3, 300, 12)
    core.step()
    stats = core.stats()
    assert stats.outstanding_prefill_tokens == 300 - 32
    assert 0 < stats.kv_cache_usage < 0.1
    core.pause("r0")
    assert core.stats().num_paused == 1
    assert core.stats().num_deferred == 0, "r0 has a row"
    core.pause("r2")
    stats = core.stats()
    assert (stats.num_paused, stats.num_deferred, stats.num_waiting) == (2, 1, 2)


def test_what_waits_for_a_known_prefix_is_no_outstanding_prefill() -> None:
    core = make_core(num_blocks=1000, max_num_batched_tokens=512, max_num_seqs=1, max_inflight_steps=1)
    core.add_request(make_request("first", list(range(100)), max_tokens=4))
    core.step()
    core.add_request(make_request("same", [*range(64), 7, 8, 9], max_tokens=4))
    core.add_request(make_request("other", [5] * 67, max_tokens=4))
    block_size = core.config.block_size
    first_next = 1
    assert core.stats().outstanding_prefill_tokens == first_next + 67 - 64 // block_size * block_size + 67


def test_expected_output_length_follows_what_ends() -> None:
    lengths = OutputLengths()
    for _ in range(200):
        lengths.observe("stop", 10)
    assert lengths.average == pytest.approx(10, abs=0.1)
    lengths.observe("abort", 10_000)
    assert lengths.average == pytest.approx(10, abs=0.1)


def test_prefills_left_to_do_are_told_in_seconds() -> None:
    core = make_core()
    core.add_request(make_request("r", list(range(40)), max_tokens=2))
    stats = replace(core.stats(), prefill_token_s=1e-3)
    assert stats.outstanding_prefill_tokens == 40
    assert stats.queued_prefill_s == pytest.approx(0.04)
    run(core)
    assert core.stats().queued_prefill_s == 0.0


def test_costs_of_mixed_steps_are_taken_apart() -> None:
    costs = StepCosts()
    rng = np.random.default_rng(0)
    prefilled = 0
    for _ in range(300):
        prefill, decodes = int(rng.integers(0, 2)) * int(rng.integers(1, 500)), int(rng.integers(0, 8))
        if prefill or decodes:
            costs.observe(prefill, decodes, (0.010 if decodes else 0.0) + prefill * 1e-4)
            prefilled += prefill
    assert costs.decode_step_s == pytest.approx(0.010, rel=0.01)
    assert costs.prefill_token_s == pytest.approx(1e-4, rel=0.01)
    assert costs.prefill_s_total == pytest.approx(prefilled * 1e-4, rel=0.01)
    before = costs.prefill_token_s
    costs.observe(100, 0, 0.0)  # a worker that does not measure changes nothing
    assert costs.prefill_token_s == before
