"""A prefix that went to the host and came back gives transformers' tokens, in fp32."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest

from app.checkpoints.model_info import ModelInfo
from app.config.engine import EngineConfig
from app.engine.core import EngineCore
from app.engine.executor import create_executor
from app.records.request import EngineRequest
from tests.engine.core_driver import KEY, Results, assert_idle, make_request, run
from tests.tiny_models import hf_greedy, hf_model, tiny_model

MAX_TOKENS = 8
HOST = {"kv_host_memory_bytes": 8 << 20}


@contextmanager
def started_core(**options: Any) -> Iterator[EngineCore]:
    common = {"device": "cpu", "num_threads": 1, "executor": "in_process", "block_size": 4}
    config = EngineConfig(model=str(tiny_model("llama")), **{**common, **options})
    core = EngineCore(config, ModelInfo.from_directory(config.model), create_executor(config), KEY)
    try:
        core.start()
        yield core
    finally:
        core.shutdown()


@cache
def prompts() -> list[list[int]]:
    rng = random.Random(8)
    return [[rng.randrange(3, 331) for _ in range(48 + i)] for i in range(5)]


@cache
def judge() -> list[list[int]]:
    model = hf_model(tiny_model("llama"))
    return [hf_greedy(model, prompt, MAX_TOKENS) for prompt in prompts()]


def requests(tag: str, **params: Any) -> list[EngineRequest]:
    params = {"max_tokens": MAX_TOKENS, "temperature": 0.0, "ignore_eos": True, **params}
    return [make_request(f"{tag}{i}", prompt, **params) for i, prompt in enumerate(prompts())]


def tokens(results: Results, tag: str) -> list[list[int]]:
    return [results.tokens[f"{tag}{i}"] for i in range(len(prompts()))]


@pytest.mark.parametrize("inflight", [1, 2, 3])
def test_restored_prefixes_give_transformers_tokens(inflight: int) -> None:
    """The device holds about one prompt, the host all of them; one by one, so that each evicts the one before."""
    with started_core(num_blocks=18, max_num_seqs=2, max_inflight_steps=inflight, **HOST) as core:
        results = Results()
        for tag in ("first", "again"):
            for request in requests(tag):
                run(core, [request], results=results)
        assert tokens(results, "first") == tokens(results, "again") == judge()
        for i, prompt in enumerate(prompts()):
            assert results.final[f"again{i}"].num_cached_tokens == (len(prompt) - 1) // 4 * 4
        assert core.stats().figures["tier_hits"] > 4 * 40
        assert_idle(core)


def test_preempted_requests_come_back_by_copy() -> None:
    params = {"max_tokens": 40, "temperature": 1.0}
    with started_core(num_blocks=200) as core:
        expected = tokens(run(core, requests("r", **params)), "r")
    with started_core(num_blocks=40, **HOST) as core:
        found = run(core, requests("r", **params))
        stats = core.stats()
        assert stats.figures["preemptions"] > 0
        assert stats.figures["tier_hits"] > 0, "nothing was loaded, although the device had given it up"
        assert tokens(found, "r") == expected
        assert_idle(core)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(2, 1), (1, 2)], ids=["tp2", "pp2"])
def test_every_rank_keeps_its_own_share(sizes: tuple[int, int]) -> None:
    parallel = {"tensor_parallel_size": sizes[0], "pipeline_parallel_size": sizes[1], "executor": "local_processes"}
    with started_core(num_blocks=18, max_num_seqs=2, **HOST, **parallel) as core:
        results = Results()
        for tag in ("first", "again"):
            for request in requests(tag):
                run(core, [request], results=results)
        assert tokens(results, "first") == tokens(results, "again") == judge()
        assert core.stats().figures["tier_hits"] > 4 * 40
