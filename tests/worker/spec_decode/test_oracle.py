"""A drafter that always lies and one that knows the answer: 1 and 1 + k tokens a step, and the same text.

Over what a request may ask for and what a model may be made of; sampled by a seed, whole under `slow`.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from app.backends import PROPOSERS
from app.checkpoints.model_info import ModelInfo
from app.config.engine import EngineConfig
from app.engine.core import EngineCore
from app.engine.executor.in_process import InProcessExecutor
from app.records.request import EngineRequest
from app.records.sampling_params import SamplingParams
from tests.engine.core_driver import KEY, assert_idle, run
from tests.tiny_models import tiny_model
from tests.worker.spec_decode.mtp_checkpoints import SHAPES
from tests.worker.spec_decode.oracle import LIAR, PROPHET, Prophet
from tests.worker.spec_decode.test_drafting import WholeLogprobs, assert_same, prompts
from tests.worker.worker_driver import decode_statically

pytestmark = pytest.mark.usefixtures("one_thread")

MAX_TOKENS = 18
ASKED: list[dict[str, Any]] = [
    {"temperature": 0.0, "logprobs": 1},
    {"temperature": 1.0, "top_p": 0.8},
    {"temperature": 0.9, "top_k": 12, "presence_penalty": 0.8, "repetition_penalty": 1.2},
    {"temperature": 0.7, "min_p": 0.02, "logit_bias": {5: 4.0}, "min_tokens": 9},
]
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "heads": ("qwen2", {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}),
    "latent-experts": ("deepseek_v3", SHAPES["deepseek_v3"].shape),
    "experts": ("glm4_moe", SHAPES["glm4_moe"].shape),
    "windows": (
        "gemma3_text",
        {"num_hidden_layers": 4, "sliding_window": 12, "layer_types": ["sliding_attention", "full_attention"] * 2},
    ),
}
MODES: dict[str, dict[str, Any]] = {
    "plenty": {"num_blocks": 300},
    "preempted": {"num_blocks": 60},
    "sync": {"max_inflight_steps": 1, "num_blocks": 300},
    "fp8": {"kv_cache_dtype": "fp8", "num_blocks": 300},
    "static": {"static": True, "num_blocks": 300},
}
CASES = [(model, mode, k) for model in MODELS for mode in MODES for k in (1, 3, 6)]
CASES = [case for case in CASES if case[:2] != ("latent-experts", "fp8")]  # a CPU has no such cache of latents
SAMPLE = random.Random(2).sample(CASES, 7)


def requests() -> list[EngineRequest]:
    common: dict[str, Any] = {"seed": 3, "max_tokens": MAX_TOKENS, "ignore_eos": True}
    return [
        EngineRequest(f"{n}", prompt, SamplingParams(**common, **ASKED[n % len(ASKED)]), choice_index=n)
        for n, prompt in enumerate(prompts()[:10])
    ]


def generate(
    model: Path, method: str | None, k: int, *, static: bool = False, **mode: Any
) -> tuple[WholeLogprobs, dict[str, float]]:
    asked = None if method is None else {"method": method, "num_speculative_tokens": k}
    sizes = {"max_model_len": 96, "block_size": 4, "max_num_seqs": 8, "max_num_batched_tokens": 64}
    config = EngineConfig(
        model=str(model), device="cpu", num_threads=1, executor="in_process", speculative_config=asked, **sizes, **mode
    )
    executor = InProcessExecutor(config)
    core = EngineCore(config, ModelInfo.from_directory(config.model), executor, KEY)
    core.start()
    try:
        if static:
            decode_statically(executor._worker, [1, 2, 4, 8])
        results = WholeLogprobs()
        run(core, requests(), results=results)
        assert_idle(core)
        return results, dict(core.stats().figures)
    finally:
        core.shutdown()


@pytest.mark.parametrize(
    ("name", "mode", "k"),
    [pytest.param(*case, marks=[] if case in SAMPLE else pytest.mark.slow) for case in CASES],
)
def test_tokens_a_step(monkeypatch: pytest.MonkeyPatch, name: str, mode: str, k: int) -> None:
    family, shape = MODELS[name]
    model = tiny_model(family, **shape)
    plain, figures = generate(model, None, k, **MODES[mode])
    assert (mode == "preempted") == (figures["preemptions"] > 0)
    monkeypatch.setattr(
        Prophet, "said", {(n, *prompt): plain.tokens[f"{n}"] for n, prompt in enumerate(prompts()[:10])}
    )
    monkeypatch.setitem(PROPOSERS._table, "prophet", PROPHET)
    monkeypatch.setitem(PROPOSERS._table, "liar", LIAR)
    for method, share in (("prophet", 1.0), ("liar", 0.0)):
        results, figures = generate(model, method, k, **MODES[mode])
        assert results.tokens == plain.tokens
        if mode != "fp8":  # whose rounding makes more of the last bit
            assert_same(results, plain)
        assert figures["draft_tokens"] > 0
        assert figures["accepted_tokens"] == share * figures["draft_tokens"]
