"""`deterministic: batch`: the logprobs of a request are the same bits whatever runs beside it and however it is cut.

Each request runs alone first, its prompt in one chunk; every other way to run it must give the logprobs of its tokens
and of the 50 most likely at each place again, bit for bit.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from app.checkpoints.model_info import ModelInfo
from app.config.engine import EngineConfig
from app.engine.core import EngineCore
from app.engine.executor.in_process import InProcessExecutor
from app.records.request import EngineRequest
from app.records.sampling_params import SamplingParams
from app.records.step import TokenLogprobs
from tests.engine.core_driver import KEY, Results, run
from tests.worker.exact_models import EXACT_MODELS, MODELS
from tests.worker.worker_driver import replay_prompts

LENGTHS = (1, 5, 17, 40, 131, 150, 64, 9)
NUM_TOKENS = 5
DTYPES = ("float32", "bfloat16")
SOME = [("mistral", "float32"), ("qwen3_moe", "bfloat16"), ("tiny-chat", "bfloat16")]
Logprobs = dict[str, list[list[tuple[int, float]]]]  # of a request: (token, logprob) of each place


def core_of(model: str, dtype: str, **options: Any) -> EngineCore:
    fixed = {"device": "cpu", "num_threads": 1, "executor": "in_process", "max_model_len": 200, "block_size": 8}
    free = {"num_blocks": 400, "max_num_seqs": 8, "max_step_s": 0, "deterministic": "batch"}
    config = EngineConfig(model=str(EXACT_MODELS[model]()), dtype=dtype, **{**fixed, **free, **options})
    core = EngineCore(config, ModelInfo.of(config), InProcessExecutor(config), KEY)
    core.start()
    return core


def requests(prefix: str = "", **params: Any) -> list[EngineRequest]:
    """One of each length, every second drawn at random; those of a length of 64 and more begin alike."""
    made = []
    for number, length in enumerate(LENGTHS):
        begin = 0 if length >= 64 else 7 * number
        prompt = [(begin + i * i + i // 50) % 300 + 5 for i in range(length)]
        options = {"temperature": 0.9 if number % 2 else 0.0, "top_p": 0.8, "seed": number, "prompt_logprobs": 1}
        options |= {"max_tokens": NUM_TOKENS, "ignore_eos": True, "logprobs": 50, **params}
        made.append(EngineRequest(f"{prefix}{number}", prompt, SamplingParams(**options)))
    return made


def bits(results: Results) -> Logprobs:
    """Prompt's and output's logprobs, by request."""
    found = {}
    for name, tokens in results.tokens.items():
        assert len(tokens) == NUM_TOKENS
        of_prompt = [one for one in results.prompt_logprobs.get(name, ()) if one is not None]
        found[name.rpartition("/")[2]] = [in_order(one) for one in (*of_prompt, *results.logprobs[name])]
    return found


def in_order(one: TokenLogprobs) -> list[tuple[int, float]]:
    return sorted(zip(one.token_ids, one.logprobs, strict=True))


@cache
def alone(model: str, dtype: str, **options: Any) -> Logprobs:
    core = core_of(model, dtype, enable_prefix_caching=False, **options)
    try:
        found: Logprobs = {}
        for request in requests():
            found |= bits(run(core, [request]))
        return found
    finally:
        core.shutdown()


def together(model: str, dtype: str, **options: Any) -> tuple[Logprobs, Results]:
    core = core_of(model, dtype, **options)
    try:
        results = run(core, requests())
        return bits(results), results
    finally:
        core.shutdown()


def assert_same(found: Logprobs, truth: Logprobs) -> None:
    """The same places have the same bits; a request that found a prefix may tell less of its prompt."""
    assert found.keys() == truth.keys()
    for name, places in truth.items():
        assert len(found[name]) == len(places), name
        for place, (one, other) in enumerate(zip(found[name], places, strict=True)):
            assert one == other, f"request {name}, place {place}"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("model", MODELS)
def test_alone_or_among_others(model: str, dtype: str) -> None:
    assert_same(together(model, dtype)[0], alone(model, dtype))


@pytest.mark.parametrize(("model", "dtype"), SOME)
@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_in_chunks_of_any_size(model: str, dtype: str, chunk: int) -> None:
    assert_same(
        together(model, dtype, max_num_batched_tokens=chunk, max_num_seqs=min(chunk, 8))[0], alone(model, dtype)
    )


@pytest.mark.parametrize(("model", "dtype"), SOME)
@pytest.mark.parametrize("chunk", [512, 40])
def test_prompts_over_static_tensors(model: str, dtype: str, chunk: int) -> None:
    """As CUDA graphs replay them: alone, some in a step, in chunks beside rows that decode, whatever pads them."""
    core = core_of(model, dtype, max_num_batched_tokens=chunk, max_num_seqs=32)
    results, asked = Results(), requests(prompt_logprobs=None)  # which no replay leaves
    try:
        ran = replay_prompts(core.executor._worker)  # type: ignore[attr-defined]
        for first in range(0, len(asked), 3):
            run(core, asked[first : first + 3], results=results)
    finally:
        core.shutdown()
    assert ran
    truth = {name: places[-NUM_TOKENS:] for name, places in alone(model, dtype).items()}
    assert_same(bits(results), truth)


@pytest.mark.parametrize(("model", "dtype"), [("llama", "float32"), *SOME[1:]])
def test_preempted(model: str, dtype: str) -> None:
    found, results = together(model, dtype, num_blocks=101, block_size=2, enable_prefix_caching=False)
    assert sum(final.num_preemptions for final in results.final.values())
    assert_same(found, alone(model, dtype))


@pytest.mark.parametrize(("model", "dtype"), SOME)
def test_behind_a_cached_prefix(model: str, dtype: str) -> None:
    core = core_of(model, dtype)
    try:
        run(core, requests("first/"))
        results = run(core, requests("again/", prompt_logprobs=None))
    finally:
        core.shutdown()
    assert sum(final.num_cached_tokens for final in results.final.values()) > 100
    truth = {name: places[-NUM_TOKENS:] for name, places in alone(model, dtype).items()}
    assert_same(bits(results), truth)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_with_drafts(method: str, dtype: str) -> None:
    drafter = {"method": method, "num_speculative_tokens": 3}
    found, results = together("llama", dtype, speculative_config=drafter)
    assert sum(final.num_right_drafts + final.num_wrong_drafts for final in results.final.values())
    assert_same(found, alone("llama", dtype))


def test_resumed_elsewhere() -> None:
    """A failover: another engine gets the prompt and the tokens that came, among requests that the first never had."""
    truth = alone("llama", "bfloat16")
    core = core_of("llama", "bfloat16")
    try:
        whole = run(core, requests()).tokens
        resumed = [
            replace(one, request_id=f"resumed/{one.request_id}", output_token_ids=whole[one.request_id][:2])
            for one in requests(prompt_logprobs=None)
        ]
        results = run(core, resumed)
    finally:
        core.shutdown()
    for name, tokens in whole.items():
        assert results.tokens[f"resumed/{name}"] == tokens[2:]
        found = [in_order(one) for one in results.logprobs[f"resumed/{name}"]]
        assert found == truth[name][-len(found) :]
