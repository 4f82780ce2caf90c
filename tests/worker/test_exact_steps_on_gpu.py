"""`deterministic: batch` on a GPU: the logprobs of a request are the same bits whatever runs beside it, however it is
cut, and whether its steps come from graphs.

Each request runs alone first, by ordinary steps, its prompt in one chunk; every other way to run it must give the
logprobs of its tokens and of the 20 most likely at each place again, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest

from app.checkpoints.model_info import ModelInfo
from app.config.engine import EngineConfig
from app.engine.core import EngineCore
from app.engine.executor.in_process import InProcessExecutor
from app.records.request import EngineRequest
from app.records.sampling_params import SamplingParams
from tests.engine.core_driver import KEY, Results, run
from tests.tiny_models import tiny_model
from tests.worker.test_exact_steps import Logprobs, assert_same, in_order

pytestmark = pytest.mark.gpu
LENGTHS = (1, 5, 17, 140, 511, 513, 1300, 64)
NUM_TOKENS = 5
OTHERS = 31  # times as many requests, that are not compared
LARGE = {"hidden_size": 1024, "head_dim": 128, "num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 5000}
EXPERTS = {"norm_topk_prob": True, "max_position_embeddings": 4096}
MODELS: Mapping[str, Any] = {
    "llama": lambda: tiny_model("llama", hidden_size=96, num_attention_heads=6, num_key_value_heads=2, mlp_bias=True,
                                max_position_embeddings=4096),
    "mistral": lambda: tiny_model("mistral", sliding_window=45, hidden_act="gelu_pytorch_tanh",
                                  max_position_embeddings=4096),
    "large llama": lambda: tiny_model("llama", intermediate_size=2816, max_position_embeddings=4096, **LARGE),
    "large qwen3": lambda: tiny_model("qwen3", intermediate_size=2816, max_position_embeddings=4096, **LARGE),
    "qwen3_moe": lambda: tiny_model("qwen3_moe", num_experts=6, num_experts_per_tok=2, moe_intermediate_size=48,
                                    **EXPERTS),
    "large qwen3_moe": lambda: tiny_model("qwen3_moe", num_experts=32, num_experts_per_tok=4,
                                          moe_intermediate_size=256, **LARGE, **EXPERTS),
    "qwen2": lambda: tiny_model("qwen2", num_attention_heads=4, num_key_value_heads=4, intermediate_size=99,
                                max_position_embeddings=4096),
    "mixtral": lambda: tiny_model("mixtral", num_local_experts=4, num_experts_per_tok=2, sliding_window=None,
                                  max_position_embeddings=4096),
}  # fmt: skip
SOME = ["large llama", "large qwen3_moe"]


@contextmanager
def core_of(model: str, make: Callable[[], Any] | None = None, **options: Any) -> Iterator[EngineCore]:
    """An engine of a model that `make` makes, or of one of MODELS."""
    fixed = {"device": "cuda", "dtype": "bfloat16", "executor": "in_process", "max_model_len": 2048, "max_step_s": 0}
    free = {"max_num_seqs": 256, "num_blocks": 8000, "deterministic": "batch", "max_num_batched_tokens": 4096}
    config = EngineConfig(model=str((make or MODELS[model])()), **{**fixed, **free, **options})
    core = EngineCore(config, ModelInfo.of(config), InProcessExecutor(config), KEY)
    core.start()
    try:
        yield core
    finally:
        core.shutdown()


def requests(prefix: str = "", start: int = 0, lengths: Sequence[int] = LENGTHS, **params: Any) -> list[EngineRequest]:
    """One of each length, every second drawn at random."""
    made = []
    for number, length in enumerate(lengths):
        begin = start if length >= 140 else start + 7 * number  # the long ones begin alike
        prompt = [(begin + i * i + i // 50) % 300 + 5 for i in range(length)]
        options = {"temperature": 0.9 if number % 2 else 0.0, "top_p": 0.8, "seed": number, "logprobs": 20}
        options |= {"max_tokens": NUM_TOKENS, "ignore_eos": True, "prompt_logprobs": 1, **params}
        made.append(EngineRequest(f"{prefix}{number}", prompt, SamplingParams(**options)))
    return made


def others() -> list[EngineRequest]:
    return [one for number in range(1, OTHERS + 1) for one in requests(f"other{number}/", 3 * number)]


def bits(results: Results, prefix: str = "") -> Logprobs:
    """Prompt's and output's logprobs of the requests that are compared."""
    found: Logprobs = {}
    for number in range(len(LENGTHS)):
        name = f"{prefix}{number}"
        assert len(results.tokens[name]) == NUM_TOKENS
        of_prompt = [one for one in results.prompt_logprobs.get(name, ()) if one is not None]
        found[str(number)] = [in_order(one) for one in (*of_prompt, *results.logprobs[name])]
    return found


@cache
def alone(model: str, deterministic: str = "batch") -> Logprobs:
    found: Logprobs = {}
    options = {"enable_prefix_caching": False, "cuda_graphs": "off", "max_num_seqs": 8, "deterministic": deterministic}
    with core_of(model, **options) as core:
        for request in requests():
            results = run(core, [request])
            name = request.request_id
            of_prompt = [one for one in results.prompt_logprobs.get(name, ()) if one is not None]
            found[name] = [in_order(one) for one in (*of_prompt, *results.logprobs[name])]
    return found


@pytest.mark.parametrize("model", MODELS)
def test_among_256_and_behind_a_cached_prefix(model: str) -> None:
    """From graphs."""
    with core_of(model, cuda_graphs="on") as core:
        assert_same(bits(run(core, [*others(), *requests()])), alone(model))
        results = run(core, [*requests("again/", prompt_logprobs=None), *others()])
        assert sum(results.final[f"again/{number}"].num_cached_tokens for number in range(len(LENGTHS))) > 1000
        assert_same(bits(results, "again/"), {name: places[-NUM_TOKENS:] for name, places in alone(model).items()})


@pytest.mark.parametrize(
    ("model", "deterministic"), [*((model, "batch") for model in MODELS), ("large llama", "batch_and_layout")]
)
def test_prompts_from_graphs(model: str, deterministic: str) -> None:
    """Alone, beside others in one step, beside rows that decode, whatever pads them."""
    options = {"cuda_graph_prompt_tokens": 1024, "cuda_graph_sizes": (1, 8), "max_num_seqs": 24, "num_blocks": 2000}
    options |= {"max_num_batched_tokens": 700, "enable_prefix_caching": False, "deterministic": deterministic}
    with core_of(model, cuda_graphs="on", **options) as core:
        while core.use_idle_time():
            pass
        results, asked = Results(), requests(prompt_logprobs=None)  # steps that show more of prompts are not replayed
        for first in range(0, len(asked), 3):
            run(core, asked[first : first + 3], results=results)
        assert core.stats().figures.get("prompt_steps_replayed", 0) >= 3
    truth = {name: places[-NUM_TOKENS:] for name, places in alone(model, deterministic).items()}
    assert_same(bits(results), truth)


@pytest.mark.parametrize("model", SOME)
@pytest.mark.parametrize("chunk", [33, 600])
def test_in_chunks_and_preempted(model: str, chunk: int) -> None:
    options = {"num_blocks": 115, "max_num_seqs": 16, "max_num_batched_tokens": chunk, "enable_prefix_caching": False}
    with core_of(model, cuda_graphs="off", **options) as core:
        results = run(core, requests(max_tokens=NUM_TOKENS))
    assert_same(bits(results), alone(model))


def test_with_drafts() -> None:
    drafter = {"method": "ngram", "num_speculative_tokens": 3}
    with core_of("large llama", speculative_config=drafter, cuda_graphs="on", max_num_seqs=16) as core:
        results = run(core, requests())
    assert sum(final.num_right_drafts + final.num_wrong_drafts for final in results.final.values())
    assert_same(bits(results), alone("large llama"))
