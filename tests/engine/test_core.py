"""EngineCore over a fake device whose tokens depend on every cached slot: results must never depend on the schedule."""

from __future__ import annotations

import itertools
import random
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from app.config.engine import EngineConfig
from app.engine.core import EngineCore
from app.errors import ConfigError, EngineDeadError, InvalidRequestError, PromptTooLongError
from app.records.request import EngineRequest, Placement
from app.records.step import ModelRunnerOutput, SchedulerOutput, TokenLogprobs
from tests import limits
from tests.engine.core_driver import KEY, Results, assert_idle, fake_info, make_core, make_request, run
from tests.engine.fake_executor import VOCAB, FakeExecutor, expected_tokens, logprobs_of


def workload(count: int, seed: int = 0, *, shared: int = 0) -> list[EngineRequest]:
    """Requests of odd lengths; with `shared`, many begin with the same tokens."""
    rng = random.Random(seed)
    common = [rng.randrange(VOCAB) for _ in range(shared)]
    requests = []
    for i in range(count):
        own = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 50))]
        prompt = common[: rng.randint(0, shared)] + own if shared else own
        requests.append(make_request(f"r{i}", prompt, max_tokens=rng.randint(1, 40), seed=rng.randrange(1000)))
    return requests


def check(requests: list[EngineRequest], results: Results) -> None:
    for request in requests:
        params = request.sampling
        assert params.seed is not None
        assert params.max_tokens is not None
        expected = expected_tokens(request.prompt_token_ids, params.seed, params.max_tokens)
        assert results.tokens[request.request_id] == expected, request.request_id
        assert results.final[request.request_id].finish_reason == "length"


@pytest.mark.parametrize(
    ("inflight", "late", "budget", "num_blocks", "caching"),
    list(itertools.product([1, 2, 4], [False, True], [8, 64, 2048], [32, 1000], [True, False])),
)
def test_tokens_do_not_depend_on_the_schedule(
    inflight: int, late: bool, budget: int, num_blocks: int, caching: bool
) -> None:
    core = make_core(
        num_blocks=num_blocks,
        late=late,
        max_inflight_steps=inflight,
        max_num_batched_tokens=budget,
        enable_prefix_caching=caching,
        max_num_seqs=16,
    )
    requests = workload(14, shared=24)
    check(requests, run(core, requests))
    assert_idle(core)


@pytest.mark.parametrize("late", [False, True])
def test_a_small_pool_under_four_times_its_load(late: bool) -> None:
    core = make_core(num_blocks=64, late=late, max_num_seqs=64, max_num_batched_tokens=256)
    rng = random.Random(3)
    requests = [
        make_request(f"r{i}", [rng.randrange(VOCAB) for _ in range(16)], max_tokens=48, seed=i) for i in range(16)
    ]
    assert sum(64 // core.config.block_size for _ in requests) == 4 * 64
    free = core.stats().num_free_blocks
    check(requests, run(core, requests))
    assert core.stats().figures["preemptions"] > 0
    assert core.stats().num_free_blocks == free
    assert_idle(core)


@pytest.mark.parametrize("late", [False, True])
def test_steps_in_flight(late: bool) -> None:
    """Exactly as many as configured, and with 1 every step message is a flush."""
    for inflight in (1, 2, 3):
        core = make_core(num_blocks=500, late=late, max_inflight_steps=inflight)
        executor = core.executor
        assert isinstance(executor, FakeExecutor)
        most = 0

        def watch(_: int, core: EngineCore = core) -> None:
            nonlocal most
            most = max(most, core.scheduler.num_unreturned)

        original = core.scheduler.update_from_output

        def update(output: ModelRunnerOutput, core: EngineCore = core, original: Any = original) -> Any:
            watch(0, core)
            return original(output)

        core.scheduler.update_from_output = update  # type: ignore[method-assign]
        run(core, [make_request("r", [1, 2, 3], max_tokens=20)], each_step=watch)
        assert most == inflight
        assert all(step_message.flush for step_message in executor.step_messages) == (inflight == 1)


@pytest.mark.parametrize("late", [False, True])
def test_calls_to_the_workers_come_between_steps(late: bool) -> None:
    tokens = []
    for called in (False, True):
        core = make_core(late=late)
        core.add_request(make_request("a", [1, 2, 3], max_tokens=12))
        found: list[int] = []
        while core.has_work():
            found += [token for output in core.step() for token in output.new_token_ids]
            if called:
                assert core.call_workers("anything", 1) == [("anything", 1)]
        tokens.append(found)
    assert len(tokens[0]) == 12
    assert tokens[0] == tokens[1]


def test_the_next_step_leaves_before_the_token_is_back() -> None:
    core = make_core(num_blocks=500, max_inflight_steps=2)
    core.add_request(make_request("r", [1, 2, 3], max_tokens=20))
    assert isinstance(core.executor, FakeExecutor)
    outputs = core.step()
    assert len(core.executor.step_messages) == 2  # the second decodes a token that only the device knows
    assert [output.new_token_ids for output in outputs] == [expected_tokens([1, 2, 3], 7, 1)]


def test_a_second_request_with_the_same_prefix_hits_the_cache() -> None:
    core = make_core(num_blocks=500, block_size=4)
    prompt = list(range(30))
    first = run(core, [make_request("a", prompt, max_tokens=3)])
    second = run(core, [make_request("b", prompt, max_tokens=3)])
    assert first.final["a"].num_cached_tokens == 0
    assert second.first["b"].num_cached_tokens == 28
    assert second.final["b"].num_cached_tokens == 28
    assert second.tokens["b"] == first.tokens["a"]
    stats = core.stats()
    assert (stats.figures["prefix_cache_queries"], stats.figures["prefix_cache_hits"]) == (60, 28)
    salted = EngineRequest("c", prompt, first_params(), placement=Placement(cache_root=b"another tenant"))
    assert run(core, [salted]).final["c"].num_cached_tokens == 0


def first_params() -> Any:
    return make_request("x", [1], max_tokens=3).sampling


def test_a_chat_turn_hits_the_blocks_of_the_answer_before_it() -> None:
    core = make_core(num_blocks=500, block_size=4)
    prompt = list(range(10))
    answer = run(core, [make_request("a", prompt, max_tokens=20)]).tokens["a"]
    turn = [*prompt, *answer, 5, 6, 7]
    results = run(core, [make_request("b", turn, max_tokens=5)])
    assert results.final["b"].num_cached_tokens == 28  # 29 tokens of the first turn have been computed
    assert results.tokens["b"] == expected_tokens(turn, 7, 5)


def test_eos_and_stop_tokens_end_a_request_whatever_is_in_flight() -> None:
    expected = expected_tokens([1, 2, 3], 7, 60)
    eos, stop = expected[10], expected[20]
    at = expected.index(eos)
    for inflight, late in itertools.product([1, 2, 4], [False, True]):
        core = make_core(num_blocks=500, max_inflight_steps=inflight, late=late, eos=eos)
        requests = [
            make_request("eos", [1, 2, 3], max_tokens=60),
            make_request("ignored", [1, 2, 3], max_tokens=60, ignore_eos=True),
            make_request("stop", [1, 2, 3], max_tokens=60, ignore_eos=True, stop_token_ids=(stop,)),
            make_request("min", [1, 2, 3], max_tokens=60, min_tokens=at + 2),
        ]
        results = run(core, requests)
        assert results.tokens["eos"] == expected[: at + 1]
        assert (results.final["eos"].finish_reason, results.final["eos"].stop_reason) == ("stop", None)
        assert results.tokens["ignored"] == expected
        assert results.final["ignored"].finish_reason == "length"
        assert results.tokens["stop"] == expected[: expected.index(stop) + 1]
        assert results.final["stop"].stop_reason == stop
        assert len(results.tokens["min"]) > at + 1
        assert_idle(core)


def test_max_tokens_none_runs_to_the_end_of_the_context() -> None:
    core = make_core(num_blocks=500, max_context=40)
    results = run(core, [make_request("r", [1] * 10, max_tokens=None)])
    assert len(results.tokens["r"]) == 30
    assert results.final["r"].finish_reason == "length"


def test_the_last_token_is_never_computed() -> None:
    """A request of exactly the pool's size fits: nothing is scheduled past max_tokens."""
    for inflight in (1, 2, 4):
        core = make_core(num_blocks=4, block_size=4, max_inflight_steps=inflight)
        results = run(core, [make_request("r", [1] * 6, max_tokens=10)])
        assert results.tokens["r"] == expected_tokens([1] * 6, 7, 10)
        assert isinstance(core.executor, FakeExecutor)
        assert sum(step_message.num_tokens for step_message in core.executor.step_messages) == 15


@pytest.mark.parametrize("num_blocks", [20, 500])
def test_logprobs_come_with_their_tokens(num_blocks: int) -> None:
    """Also across preemption and chunks; the prompt's come once, whole, and equal the outside truth."""
    for late in (False, True):
        core = make_core(num_blocks=num_blocks, late=late, max_num_batched_tokens=16)
        requests = [
            make_request(f"r{i}", list(range(i, i + 20)), max_tokens=24, logprobs=0, prompt_logprobs=0, seed=i)
            for i in range(4)
        ]
        collected: dict[str, list[TokenLogprobs]] = {}
        prompts: dict[str, list[Any]] = {}
        for request in requests:
            core.add_request(request)
        while core.has_work():
            for output in core.step():
                assert output.logprobs is not None
                assert len(output.logprobs) == len(output.new_token_ids)
                collected.setdefault(output.request_id, []).extend(output.logprobs)
                if output.prompt_logprobs is not None:
                    assert output.request_id not in prompts
                    prompts[output.request_id] = output.prompt_logprobs
        assert (core.stats().figures["preemptions"] > 0) == (num_blocks == 20)
        for i, request in enumerate(requests):
            tokens = expected_tokens(request.prompt_token_ids, i, 24)
            assert collected[f"r{i}"] == [logprobs_of(token, 20 + j) for j, token in enumerate(tokens)]
            prompt = request.prompt_token_ids
            assert prompts[f"r{i}"] == [None] + [logprobs_of(prompt[p], p) for p in range(1, 20)]
        assert_idle(core)


def test_prompt_logprobs_do_not_read_the_cache() -> None:
    core = make_core(num_blocks=100)
    run(core, [make_request("a", list(range(20)))])
    results = run(core, [make_request("b", list(range(20)), prompt_logprobs=0)])
    assert results.final["b"].num_cached_tokens == 0
    assert results.first["b"].prompt_logprobs is not None


@pytest.mark.parametrize(("inflight", "late"), [(1, False), (2, False), (2, True), (4, True)])
def test_abort_at_any_step_frees_everything(inflight: int, late: bool) -> None:
    for when in range(0, 24, 2):
        core = make_core(num_blocks=40, max_inflight_steps=inflight, late=late, max_num_batched_tokens=12)
        requests = workload(6, seed=when)
        results = Results()

        def abort(step: int, core: EngineCore = core, when: int = when) -> None:
            if step == when:
                core.abort_requests(["r1", "r3", "r5", "unknown"])

        run(core, requests, results=results, each_step=abort)
        assert len(results.final) == 6
        for request in requests:
            name, params = request.request_id, request.sampling
            assert params.seed is not None
            assert params.max_tokens is not None
            expected = expected_tokens(request.prompt_token_ids, params.seed, params.max_tokens)
            if results.final[name].finish_reason == "abort":
                assert name in ("r1", "r3", "r5")
                assert results.tokens[name] == expected[: len(results.tokens[name])]
            else:
                assert results.tokens[name] == expected
        assert_idle(core)


def test_requests_are_refused_before_they_meet_others() -> None:
    core = make_core(num_blocks=10, block_size=4)
    with pytest.raises(PromptTooLongError, match=r"holds 40 tokens.*needs 42: 41 in the prompt"):
        core.add_request(make_request("r", [1] * 41))
    with pytest.raises(InvalidRequestError, match=f"prompt: token ids must be from 0 to {VOCAB - 1}, not {VOCAB}"):
        core.add_request(make_request("r", [VOCAB]))
    assert not core.has_work()
    core.add_request(make_request("r", [1]))
    with pytest.raises(InvalidRequestError, match="already in use"):
        core.add_request(make_request("r", [1]))
    run(core)
    core.add_request(make_request("r", [1]))  # its id is free again
    run(core)


def test_one_request_that_fails_fails_alone() -> None:
    """The device brings no logprobs for a request that asked: that one ends with an error, the others go on."""

    class Forgetful(FakeExecutor):
        def submit(self, step_message: Any) -> None:
            super().submit(step_message)
            for output in self.calls[-1]:
                output.logprobs = None

    core = EngineCore(EngineConfig(block_size=4), fake_info(), Forgetful(100), KEY)
    core.start()
    requests = [make_request("good", [1, 2]), make_request("bad", [1, 2, 3], logprobs=1)]
    results = run(core, requests)
    assert results.tokens["good"] == expected_tokens([1, 2], 7, 16)
    assert results.final["bad"].finish_reason == "error"
    assert "logprobs" in str(results.final["bad"].error)
    assert_idle(core)


def test_a_request_that_cannot_be_scheduled_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    core = make_core(num_blocks=100)
    admit = core.scheduler.kv.admit

    def fail_for_bad(request: Any, *args: Any) -> bool:
        if request.request_id == "bad":
            raise MemoryError("no memory for bad")
        return admit(request, *args)

    monkeypatch.setattr(core.scheduler.kv, "admit", fail_for_bad)
    results = run(core, [make_request("bad", [1]), make_request("good", [1, 2])])
    assert results.final["bad"].finish_reason == "error"
    assert results.tokens["good"] == expected_tokens([1, 2], 7, 16)
    assert_idle(core)


def test_a_missing_step_is_an_error_and_not_a_mix_up() -> None:
    core = make_core(num_blocks=100, max_inflight_steps=2)
    core.add_request(make_request("r", [1]))
    first, second = core.scheduler.schedule(), core.scheduler.schedule()
    assert first is not None
    assert second is not None
    with pytest.raises(RuntimeError, match=f"never step {first.step_id}"):
        core.scheduler.update_from_output(ModelRunnerOutput(second.step_id, np.array([1], np.int32)))


def test_workers_that_keep_outputs_back_are_found_out() -> None:
    class Silent(FakeExecutor):
        def collect(self) -> list[ModelRunnerOutput]:
            super().collect()
            return []

    core = EngineCore(EngineConfig(block_size=4), fake_info(), Silent(100), KEY)
    core.start()
    core.add_request(make_request("r", [1]))
    with pytest.raises(EngineDeadError, match="did not return"):
        run(core)


def test_max_model_len_beyond_the_model_is_a_configuration_error() -> None:
    with pytest.raises(ConfigError, match=r"max_model_len=5000 .* 4096"):
        make_core(max_model_len=5000)


def test_outputs_carry_queue_time_and_aborts_carry_nothing() -> None:
    core = make_core(num_blocks=100, max_num_seqs=1)
    results = run(core, [make_request("a", [1], max_tokens=30), make_request("b", [2])])
    assert results.first["b"].queue_time_s > results.first["a"].queue_time_s >= 0
    core.add_request(make_request("c", [3]))
    core.abort_requests(["c"])
    assert core.has_work()
    (output,) = core.step()
    assert (output.finish_reason, output.new_token_ids) == ("abort", [])


def test_kv_events_mirror_the_cache() -> None:
    events: set[bytes] = set()

    class Sink:
        def report_stored(self, parent: bytes, hashes: list[bytes]) -> None:
            events.update(hashes)

        def report_removed(self, hashes: list[bytes]) -> None:
            events.difference_update(hashes)

    core = make_core(num_blocks=32, sink=Sink())
    requests = workload(20, shared=20)
    check(requests, run(core, requests))
    pool = core.scheduler.kv.pool
    assert len(events) == pool.num_cached > 0
    assert all(pool.find(block_hash) is not None for block_hash in events)


class Background(FakeExecutor):
    """A device that computes in a thread of its own, so that what overlaps can be seen."""

    def __init__(self) -> None:
        super().__init__(200, 4)
        self.events: list[tuple[str, int]] = []
        self.pool = ThreadPoolExecutor(1)
        self.steps: deque[Future[ModelRunnerOutput]] = deque()

    def submit(self, step_message: SchedulerOutput) -> None:
        self.events.append(("submitted", step_message.step_id))
        self.steps.append(self.pool.submit(self.compute_step, step_message))

    def compute_step(self, step_message: SchedulerOutput) -> ModelRunnerOutput:
        limits.pause(0.003)
        output = self.execute(step_message)
        self.events.append(("computed", step_message.step_id))
        return output

    def collect(self) -> list[ModelRunnerOutput]:
        output = self.steps.popleft().result()
        self.unreturned.pop(output.step_id)
        self.events.append(("collected", output.step_id))
        return [output]


@pytest.mark.parametrize("inflight", [1, 2])
def test_the_next_step_is_prepared_while_the_device_computes(inflight: int) -> None:
    """The trace of I2: with two steps in flight the device always finds the next one waiting; with one it never
    does."""
    executor = Background()
    config = EngineConfig(block_size=4, max_inflight_steps=inflight)
    core = EngineCore(config, fake_info(), executor, KEY)
    core.start()
    results = run(core, [make_request("r", [1, 2, 3], max_tokens=20)])
    executor.pool.shutdown()
    assert results.tokens["r"] == expected_tokens([1, 2, 3], 7, 20)
    at = {event: index for index, event in enumerate(executor.events)}
    ahead = [at["submitted", step + 1] < at["computed", step] for step in range(2, 19)]
    assert sum(ahead) >= 15 if inflight == 2 else not any(ahead)
