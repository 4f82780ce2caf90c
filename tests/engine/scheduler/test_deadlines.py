"""A request whose deadline passes ends with an error, wherever it is, and leaves nothing behind."""

from __future__ import annotations

import time
from dataclasses import replace

from app.engine.core import EngineCore
from app.engine.scheduler.deadlines import SPARE
from app.records.request import Deadline, EngineRequest, Placement
from tests.engine.core_driver import Results, assert_idle, make_core, make_request, run


def request(request_id: str, timeout_s: float, until_first_token: bool = False, max_tokens: int = 40) -> EngineRequest:
    made = make_request(request_id, [1, 2, 3, 4, 5], max_tokens=max_tokens)
    return replace(made, placement=Placement(deadline=Deadline(timeout_s, until_first_token)))


def step(core: EngineCore, results: Results, number: int) -> None:
    for _ in range(number):
        results.take(core.step())


def test_one_that_waits_and_one_that_runs_end_and_free_their_blocks() -> None:
    now = time.monotonic()
    core = make_core(num_blocks=64, max_num_seqs=1)
    core.scheduler._clock = lambda: now
    for one in (request("runs", 5.0), request("waits", 5.0), request("has time", 50.0, max_tokens=3)):
        core.add_request(one)
    results = Results()
    step(core, results, 5)
    core.end_late_requests()
    assert not results.final
    now += 10.0
    core.end_late_requests()
    run(core, results=results)
    assert {name: final.finish_reason for name, final in results.final.items()} == {
        "runs": "error",
        "waits": "error",
        "has time": "length",
    }
    assert results.tokens["runs"], "it had begun"
    error = results.final["waits"].as_error()
    assert (error.status, error.code) == (504, "deadline")
    assert "got no token within its deadline of 5 s, all of which it waited" in error.message
    assert "did not end within" in results.final["runs"].as_error().message
    assert_idle(core)


def test_a_stream_that_has_begun_in_time_goes_on() -> None:
    now = time.monotonic()
    core = make_core(num_blocks=64, max_num_seqs=1)
    core.scheduler._clock = lambda: now
    core.add_request(request("begun", 5.0, until_first_token=True))
    core.add_request(request("late", 5.0, until_first_token=True))
    results = Results()
    step(core, results, 5)
    now += 10.0
    core.end_late_requests()
    run(core, results=results)
    assert results.final["begun"].finish_reason == "length"
    assert results.final["late"].is_late


def test_what_has_ended_is_not_kept_until_its_deadline() -> None:
    core = make_core(num_blocks=64)
    for i in range(5 * SPARE):
        run(core, [request(f"r{i}", 1000.0, max_tokens=1)])
    assert len(core.scheduler.deadlines) <= 2 * SPARE
    assert core.next_deadline_s > time.monotonic()


def test_without_deadlines_there_is_nothing_to_look_at() -> None:
    core = make_core(num_blocks=64)
    core.add_request(make_request("r", [1, 2, 3], max_tokens=2))
    assert core.next_deadline_s == float("inf")
    run(core)
