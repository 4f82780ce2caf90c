"""Who is scheduled when: budget, order, fairness, preemption, pauses. Tokens are judged in test_core.py."""

from __future__ import annotations

import random
from collections import defaultdict

import numpy as np
import pytest

from app.engine.core import EngineCore
from app.records.step import ModelRunnerOutput, SchedulerOutput
from tests.engine.core_driver import Results, assert_idle, make_core, make_request, run
from tests.engine.fake_executor import FakeExecutor, expected_tokens


def step_messages(core: EngineCore) -> list[SchedulerOutput]:
    assert isinstance(core.executor, FakeExecutor)
    return core.executor.step_messages


def prompt(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(900) for _ in range(length)]


def test_no_step_exceeds_the_budget_and_decodes_come_first() -> None:
    core = make_core(num_blocks=500, max_num_batched_tokens=20, max_num_seqs=12)
    run(core, [make_request(f"r{i}", prompt(30 + i, i), max_tokens=20) for i in range(12)])
    for step_message in step_messages(core):
        assert step_message.num_tokens <= 20
        counts = step_message.num_scheduled_tokens.tolist()
        prefills = [i for i, count in enumerate(counts) if count > 1]
        assert all(count > 1 for count in counts[prefills[0] : prefills[-1]]) if prefills else True
    assert_idle(core)


def test_a_step_beside_others_is_short_where_prompts_take_long() -> None:
    core = make_core(num_blocks=2000, max_num_batched_tokens=2048, max_step_s=0.05)
    core.scheduler._statistics.costs.observe(1000, 0, 0.1)
    run(core, [make_request(f"long{i}", prompt(1000, i), max_tokens=2) for i in range(4)])
    # 500 would take as long; 520 are left of the first prompt then.
    assert [step.num_tokens for step in step_messages(core)[:3]] == [480, 520, 481]
    assert_idle(core)


def test_every_running_decode_is_in_every_step() -> None:
    """A long prompt arriving among decodes delays none of them."""
    core = make_core(num_blocks=500, max_num_batched_tokens=16, max_inflight_steps=1)
    for i in range(5):
        core.add_request(make_request(f"d{i}", prompt(3, i), max_tokens=40))
    results = Results()
    for _ in range(3):
        results.take(core.step())
    before = len(step_messages(core))
    core.add_request(make_request("long", prompt(200), max_tokens=4))
    for _ in range(15):
        results.take(core.step())
    for step_message in step_messages(core)[before:]:
        assert step_message.num_scheduled_tokens.tolist()[:5] == [1] * 5
    assert len({len(results.tokens[f"d{i}"]) for i in range(5)}) == 1
    run(core, results=results)
    assert_idle(core)


@pytest.mark.parametrize("inflight", [1, 2])
def test_a_short_request_behind_a_long_one_finishes_first(inflight: int) -> None:
    core = make_core(num_blocks=2000, max_num_batched_tokens=64, max_inflight_steps=inflight)
    core.add_request(make_request("long", prompt(2000), max_tokens=4))
    results = Results()
    results.take(core.step())
    core.add_request(make_request("short", prompt(8), max_tokens=4))
    started = core.stats().steps_total
    run(core, results=results, each_step=lambda _: None)
    assert results.order == ["short", "long"]
    short_steps = next(i for i, step_message in enumerate(step_messages(core)) if step_message.new_requests and i > 0)
    assert short_steps <= started + inflight + 1, "the short prompt waited for the long one"


def test_a_short_one_gets_in_behind_several_waiting_long_ones() -> None:
    core = make_core(num_blocks=4000, max_num_batched_tokens=64)
    long = [make_request(f"long{i}", prompt(1000, i), max_tokens=2) for i in range(4)]
    results = run(core, [*long, make_request("short", prompt(8, 9), max_tokens=4)])
    assert results.order[0] == "short"


def test_a_stream_of_short_ones_does_not_starve_a_long_one() -> None:
    core = make_core(num_blocks=4000, max_num_batched_tokens=64, max_num_seqs=64)
    core.add_request(make_request("long", prompt(960), max_tokens=1))
    results = Results()
    for step in range(200):
        for j in range(6):
            core.add_request(make_request(f"s{step}.{j}", prompt(12, step * 10 + j), max_tokens=1))
        results.take(core.step())
        if "long" in results.final:
            break
    assert "long" in results.final, "the long prompt starved"
    assert step <= 40  # half of each step is its own: 960 / 32 steps


def test_what_the_short_ones_leave_the_long_one_gets() -> None:
    core = make_core(num_blocks=4000, max_num_batched_tokens=64, max_inflight_steps=1)
    core.add_request(make_request("long", prompt(300), max_tokens=1))
    core.add_request(make_request("short", prompt(4, 1), max_tokens=1))
    core.step()
    assert step_messages(core)[0].num_tokens == 64


def test_fcfs_is_the_order_of_admission() -> None:
    core = make_core(num_blocks=500, max_num_seqs=2)
    prompts = [prompt(5, i) for i in range(8)]
    run(core, [make_request(f"r{i}", prompts[i], max_tokens=8) for i in range(8)])
    admitted = [new.token_ids.tolist() for step_message in step_messages(core) for new in step_message.new_requests]
    assert admitted == prompts


def test_priority_goes_before_arrival() -> None:
    core = make_core(num_blocks=500, max_num_seqs=1, scheduling_policy="priority")
    requests = [make_request(f"r{i}", prompt(5, i), max_tokens=4, priority=-i) for i in range(5)]
    assert run(core, requests).order == ["r4", "r3", "r2", "r1", "r0"]


def test_under_fcfs_priority_means_nothing() -> None:
    core = make_core(num_blocks=500, max_num_seqs=1)
    requests = [make_request(f"r{i}", prompt(5, i), max_tokens=4, priority=-i) for i in range(3)]
    assert run(core, requests).order == ["r0", "r1", "r2"]


def test_preemption_takes_the_lowest_rank() -> None:
    core = make_core(num_blocks=12, max_num_seqs=3, scheduling_policy="priority", enable_prefix_caching=False)
    requests = [make_request(f"r{p}", prompt(7, p), max_tokens=25, priority=p) for p in (2, 0, 1)]
    results = run(core, requests)
    assert results.final["r0"].num_preemptions == 0
    assert results.final["r2"].num_preemptions > 0
    assert results.order[0] == "r0"
    assert_idle(core)


@pytest.mark.parametrize("late", [False, True])
def test_a_request_that_needs_the_whole_pool_gets_it(late: bool) -> None:
    core = make_core(num_blocks=16, late=late, max_num_batched_tokens=16)
    requests = [make_request(f"r{i}", prompt(20, i), max_tokens=44, seed=i) for i in range(6)]
    results = run(core, requests)
    for i, request in enumerate(requests):
        assert results.tokens[f"r{i}"] == expected_tokens(request.prompt_token_ids, i, 44)
    assert core.stats().figures["preemptions"] > 0
    assert_idle(core)


def test_a_paused_request_computes_nothing_and_keeps_its_place() -> None:
    core = make_core(num_blocks=500)
    core.add_request(make_request("a", prompt(5, 1), max_tokens=30))
    core.add_request(make_request("b", prompt(5, 2), max_tokens=30))
    results = Results()
    for _ in range(5):
        results.take(core.step())
    core.pause("a")
    run(core, results=results)
    assert results.order == ["b"]
    had = len(results.tokens["a"])
    assert had < 30
    assert not core.has_work()
    assert core.stats().num_paused == 1
    core.resume("a")
    run(core, results=results)
    assert results.tokens["a"] == expected_tokens(prompt(5, 1), 7, 30)
    assert results.final["a"].num_preemptions == 0  # nobody needed its row
    assert_idle(core)


def test_paused_requests_give_way_to_waiting_ones() -> None:
    """Held rows and blocks keep nobody else waiting."""
    core = make_core(num_blocks=24, max_num_seqs=2)
    results = Results()
    for name in ("a", "b"):
        core.add_request(make_request(name, prompt(8, ord(name)), max_tokens=40))
    for _ in range(4):
        results.take(core.step())
    core.pause("a")
    core.pause("b")
    for name in ("c", "d", "e"):
        core.add_request(make_request(name, prompt(8, ord(name)), max_tokens=40))
    run(core, results=results)
    assert sorted(results.order) == ["c", "d", "e"]
    core.resume("a")
    core.resume("b")
    run(core, results=results)
    for name in "abcde":
        assert results.tokens[name] == expected_tokens(prompt(8, ord(name)), 7, 40)
    assert_idle(core)


def test_a_paused_waiting_request_lets_others_pass() -> None:
    core = make_core(num_blocks=100, max_num_seqs=1)
    core.add_request(make_request("a", prompt(5, 1)))
    core.add_request(make_request("b", prompt(5, 2)))
    core.pause("a")
    results = run(core)
    assert results.order == ["b"]
    core.resume("a")
    assert run(core, results=results).order == ["b", "a"]


def test_more_decodes_than_the_budget_still_all_finish() -> None:
    core = make_core(num_blocks=500, max_num_batched_tokens=3, max_num_seqs=8)
    requests = [make_request(f"r{i}", prompt(4, i), max_tokens=10, seed=i) for i in range(8)]
    results = run(core, requests)
    for i in range(8):
        assert results.tokens[f"r{i}"] == expected_tokens(prompt(4, i), i, 10)
    assert_idle(core)


def test_step_messages_carry_only_what_changed() -> None:
    core = make_core(num_blocks=500, block_size=8, max_num_seqs=4)
    run(core, [make_request(f"r{i}", prompt(8, i), max_tokens=33) for i in range(4)])
    sent: dict[int, int] = defaultdict(int)
    for step_message in step_messages(core):
        for new in step_message.new_requests:
            sent[new.row] += len(new.block_ids)
        for row, blocks in step_message.new_blocks:
            assert blocks
            sent[row] += len(blocks)
    assert sent == dict.fromkeys(range(4), 5)  # 8 + 33 - 1 = 40 tokens are computed
    assert sum(len(step_message.new_requests) for step_message in step_messages(core)) == 4
    steady = [
        step_message
        for step_message in step_messages(core)
        if not (step_message.new_requests or step_message.new_blocks or step_message.freed_rows)
    ]
    assert len(steady) >= len(step_messages(core)) - 8


def test_step_ids_rise_and_arrays_have_the_documented_types() -> None:
    core = make_core(num_blocks=500)
    run(core, [make_request("r", prompt(8), max_tokens=5)])
    ids = [step_message.step_id for step_message in step_messages(core)]
    assert ids == sorted(set(ids))
    for step_message in step_messages(core):
        assert (step_message.rows.dtype, step_message.num_scheduled_tokens.dtype) == (np.int32, np.int32)
        assert step_message.samples.dtype == np.bool_


def test_a_paused_request_of_high_rank_gives_its_blocks_to_a_running_one() -> None:
    core = make_core(num_blocks=20, max_num_seqs=4)
    core.add_request(make_request("held", prompt(30, 1), max_tokens=40))
    core.add_request(make_request("runs", prompt(6, 2), max_tokens=60))
    results = Results()
    for _ in range(4):
        results.take(core.step())
    core.pause("held")
    run(core, results=results)
    assert results.order == ["runs"]
    core.resume("held")
    run(core, results=results)
    assert results.tokens["held"] == expected_tokens(prompt(30, 1), 7, 40)
    assert results.final["held"].num_preemptions == 1
    assert_idle(core)


def test_a_prompt_is_not_let_in_on_blocks_that_a_running_prompt_still_needs() -> None:
    core = make_core(num_blocks=20, max_num_batched_tokens=16)
    results = run(
        core, [make_request("a", prompt(60, 1), max_tokens=4), make_request("b", prompt(40, 2), max_tokens=4)]
    )
    assert results.order == ["a", "b"]
    assert core.stats().figures["preemptions"] == 0


@pytest.mark.parametrize("inflight", [1, 2])
def test_a_prompt_of_high_rank_takes_blocks_from_a_decode_of_the_same_step(inflight: int) -> None:
    core = make_core(num_blocks=18, max_num_batched_tokens=5, scheduling_policy="priority", max_inflight_steps=inflight)
    core.add_request(make_request("low", prompt(4, 1), max_tokens=60, priority=5))
    results = Results()
    for _ in range(3):
        results.take(core.step())
    core.add_request(make_request("high", prompt(60, 2), max_tokens=10))
    run(core, results=results)
    assert results.order == ["high", "low"]
    assert results.final["low"].num_preemptions > 0
    assert results.tokens["high"] == expected_tokens(prompt(60, 2), 7, 10)
    assert results.tokens["low"] == expected_tokens(prompt(4, 1), 7, 60)
    assert_idle(core)


@pytest.mark.parametrize("late", [False, True])
def test_tokens_of_a_request_preempted_in_flight_are_kept(late: bool) -> None:
    """Every token that the device samples is delivered: none is sampled twice because a preemption lost it."""
    core = make_core(num_blocks=24, late=late, max_num_seqs=8, max_inflight_steps=3)
    requests = [make_request(f"r{i}", prompt(10, i), max_tokens=50, seed=i) for i in range(8)]
    results = run(core, requests)
    assert core.stats().figures["preemptions"] > 0
    assert (
        sum(int(step_message.samples.sum()) for step_message in step_messages(core))
        == sum(map(len, results.tokens.values()))
        == 400
    )


def test_equal_prompts_that_arrive_together_are_computed_once() -> None:
    core = make_core(num_blocks=1000, max_num_batched_tokens=4096)
    results = run(core, [make_request(f"r{i}", prompt(401), max_tokens=2, seed=i) for i in range(8)])
    assert sum(step_message.num_tokens for step_message in step_messages(core)) == 401 + 7 * 1 + 8
    assert [results.final[f"r{i}"].num_cached_tokens for i in range(8)] == [0] + [400] * 7
    for i in range(8):
        assert results.tokens[f"r{i}"] == expected_tokens(prompt(401), i, 2)


def test_equal_short_prompts_do_not_wait_for_each_other() -> None:
    core = make_core(num_blocks=1000)
    run(core, [make_request(f"r{i}", prompt(40), max_tokens=2) for i in range(4)])
    assert len(step_messages(core)[0].new_requests) == 4


def test_nobody_waits_for_the_blocks_of_a_held_or_gone_request() -> None:
    for end in ("pause", "abort"):
        core = make_core(num_blocks=1000, max_num_batched_tokens=32)
        core.add_request(make_request("a", prompt(400), max_tokens=2))
        results = Results()
        results.take(core.step())
        core.add_request(make_request("b", prompt(400), max_tokens=2))
        if end == "pause":
            core.pause("a")
        else:
            core.abort_requests(["a"])
        run(core, results=results)
        assert results.final["b"].finish_reason == "length"
        if end == "pause":
            core.resume("a")
        run(core, results=results)
        assert_idle(core)


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_a_pipeline_goes_on_when_the_pool_is_full(stages: int) -> None:
    """The micro-batch whose turn it is may hold only rows that lack a block and outrank nobody."""
    core = make_core(num_blocks=32, executor="local_processes", pipeline_parallel_size=stages, max_num_seqs=8)
    for repeat in range(6):
        requests = [make_request(f"{repeat}.{i}", [10 + i] * (5 + 3 * i + repeat), max_tokens=60) for i in range(5)]
        results = run(core, requests)
        for request in requests:
            assert results.tokens[request.request_id] == expected_tokens(request.prompt_token_ids, 7, 60)
    assert core.stats().figures["preemptions"] > 0
    assert_idle(core)


def test_figures_of_workers_are_taken_in_whichever_output_says_so() -> None:
    """On a GPU a flush brings two outputs, of which the last, that of no step, has them: totals grow, gauges change."""
    core, none = make_core(), np.empty(0, np.int32)
    for figures in (
        {"experts_moved": 3, "expert_imbalance": 1.2},
        {},
        {"experts_moved": 2, "expert_imbalance": 1.1},
        {},
    ):
        core.scheduler.update_from_output(ModelRunnerOutput(0, none, figures=figures))
    told = core.stats().figures
    assert (told["experts_moved"], told["expert_imbalance"]) == (5, 1.1)
