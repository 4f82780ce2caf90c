"""EngineCore over the real worker and a random tiny model; transformers is the judge."""

from __future__ import annotations

import functools
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import pytest

from app.checkpoints.model_info import ModelInfo
from app.config.engine import EngineConfig
from app.engine.core import EngineCore
from app.engine.executor.in_process import InProcessExecutor
from app.records.request import EngineRequest
from tests.engine.core_driver import KEY, Results, assert_idle, make_request, run
from tests.tiny_models import hf_greedy, hf_model, tiny_model
from tests.worker.worker_driver import decode_statically

MAX_TOKENS = 24


@contextmanager
def started_core(**options: Any) -> Iterator[EngineCore]:
    directory = tiny_model("llama")
    config = EngineConfig(
        model=str(directory), device="cpu", num_threads=1, executor="in_process", block_size=4, **options
    )
    core = EngineCore(config, ModelInfo.from_directory(config.model), InProcessExecutor(config), KEY)
    core.start()
    try:
        yield core
    finally:
        core.shutdown()


@functools.cache
def prompts(count: int) -> list[list[int]]:
    rng = random.Random(5)
    return [[rng.randrange(3, 331) for _ in range(rng.randint(1, 45))] for _ in range(count)]


@functools.cache
def judge(count: int) -> list[list[int]]:
    """transformers' greedy answers, one prompt at a time."""
    model = hf_model(tiny_model("llama"))
    return [hf_greedy(model, prompt, MAX_TOKENS) for prompt in prompts(count)]


def greedy_requests(count: int) -> list[EngineRequest]:
    return [
        make_request(f"r{i}", prompt, max_tokens=MAX_TOKENS, temperature=0.0, ignore_eos=True)
        for i, prompt in enumerate(prompts(count))
    ]


def tokens_of(results: Results, count: int) -> list[list[int]]:
    return [results.tokens[f"r{i}"] for i in range(count)]


@pytest.mark.parametrize(
    "options",
    [
        {"max_inflight_steps": 1},
        {"max_inflight_steps": 2},
        {"max_num_batched_tokens": 16},
        {"max_num_batched_tokens": 16, "max_inflight_steps": 4, "max_num_seqs": 5},
        {"enable_prefix_caching": False},
        {"num_blocks": 24, "max_num_seqs": 8},
    ],
    ids=lambda options: ",".join(f"{name}={value}" for name, value in options.items()),
)
def test_greedy_tokens_equal_transformers(options: dict[str, Any]) -> None:
    with started_core(**options) as core:
        assert tokens_of(run(core, greedy_requests(20)), 20) == judge(20)
        assert (core.stats().figures["preemptions"] > 0) == ("num_blocks" in options)
        cached = run(core, greedy_requests(20))  # once more, now from the cache
        assert tokens_of(cached, 20) == judge(20)
        if "num_blocks" not in options:  # a small pool has forgotten the first prompt before it comes again
            hits = [cached.final[f"r{i}"].num_cached_tokens for i in range(20)]
            assert (sum(hits) > 0) == options.get("enable_prefix_caching", True)
        assert_idle(core)


def sampled_requests(count: int) -> list[EngineRequest]:
    """Every request with sampling of its own; seeds fixed."""
    rng = random.Random(11)
    requests = []
    for i in range(count):
        prompt = [rng.randrange(3, 331) for _ in range(rng.randint(4, 24))]
        requests.append(
            make_request(
                f"r{i}",
                prompt,
                max_tokens=40,
                ignore_eos=True,
                seed=i,
                temperature=rng.choice([0.0, 0.7, 1.0]),
                top_p=rng.choice([1.0, 0.9]),
                top_k=rng.choice([0, 20]),
                frequency_penalty=rng.choice([0.0, 0.5]),
            )
        )
    return requests


def test_a_pool_of_64_blocks_under_four_times_its_load() -> None:
    requests = sampled_requests(24)
    load = sum(-(-(len(r.prompt_token_ids) + 40) // 4) for r in requests)
    assert load > 4 * 64
    with started_core(num_blocks=1000, max_num_seqs=32) as core:
        free_run = run(core, requests)
        assert core.stats().figures["preemptions"] == 0
    with started_core(num_blocks=64, max_num_seqs=32) as core:
        free = core.stats().num_free_blocks
        tight_run = run(core, requests)
        assert core.stats().figures["preemptions"] > 0
        assert core.stats().num_free_blocks == free
        assert_idle(core)
    assert tight_run.tokens == free_run.tokens


def test_steps_over_static_tensors_say_the_same_when_preempted_and_aborted() -> None:
    """Decode steps as a GPU's graphs run them, three in flight, over a pool that is too small."""
    requests = sampled_requests(24)
    with started_core(num_blocks=1000, max_num_seqs=32) as core:
        expected = run(core, requests).tokens
    with started_core(num_blocks=64, max_num_seqs=32, max_inflight_steps=3) as core:
        worker = cast("InProcessExecutor", core.executor)._worker
        decode_statically(worker, [1, 4, 8, 32])
        found = run(core, requests, each_step=lambda step: core.abort_requests(["r3"] if step == 12 else []))
        assert core.stats().figures["preemptions"] > 0
        assert_idle(core)
    assert found.final["r3"].finish_reason == "abort"
    cut = found.tokens.pop("r3")
    assert cut == expected.pop("r3")[: len(cut)]
    assert found.tokens == expected


def test_32_concurrent_take_at_most_half_the_time_of_32_solo_and_say_the_same() -> None:
    requests = sampled_requests(32)
    with started_core(max_num_seqs=32, enable_prefix_caching=False) as core:
        run(core, requests[:2])
        began = time.process_time()
        together = run(core, requests)
        together_s = time.process_time() - began
        began = time.process_time()
        alone = Results()
        for request in requests:
            run(core, [request], results=alone)
        alone_s = time.process_time() - began
    assert together.tokens == alone.tokens
    assert together_s <= alone_s / 2, f"{together_s:.2f} s together, {alone_s:.2f} s one by one"


def test_prompt_logprobs_across_chunks_equal_those_in_one() -> None:
    prompt = prompts(20)[3] + prompts(20)[4]
    found = []
    for budget in (2048, 7):
        with started_core(max_num_batched_tokens=budget) as core:
            request = make_request("r", prompt, max_tokens=3, temperature=0.0, prompt_logprobs=2, logprobs=2)
            first = run(core, [request]).first["r"]
            assert first.prompt_logprobs is not None
            found.append(first.prompt_logprobs)
    whole, chunked = found
    assert whole[0] is None
    assert len(whole) == len(chunked) == len(prompt)
    for position, (one, other) in enumerate(zip(whole[1:], chunked[1:], strict=True), start=1):
        assert one is not None
        assert other is not None
        assert one.token_ids == other.token_ids
        assert one.token_ids[0] == prompt[position]
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)


def test_no_schedule_of_tests_depends_on_how_long_steps_take() -> None:
    """See tests/conftest.py: where a test says nothing of it, steps on a CPU may take as long as they do."""
    with started_core(num_blocks=20) as core:
        assert core.scheduler._rules.prompt_time.max_step_s == 0
