"""What an engine does beside computing steps, with every family of experts: tokens of transformers all the same.

CI takes each feature once, with a family drawn by a seed; `make acceptance` takes the whole matrix.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from app import LLM, SamplingParams
from app.checkpoints.model_info import ASSETS, ModelInfo
from app.config.engine import EngineConfig
from app.engine.core import EngineCore
from app.engine.executor.in_process import InProcessExecutor
from tests.engine.core_driver import KEY, assert_idle, make_request, run
from tests.hf_logprobs import prompts
from tests.models.families.expert_variants import EXPERT_VARIANTS
from tests.tiny_models import hf_greedy, hf_model, tiny_model
from tests.worker.attention.test_fp8_kv import RoundedCache
from tests.worker.worker_driver import decode_statically

MAX_TOKENS = 8
NEAR_TIE = 0.02  # between logits that spread by 1 to 2


def model_of(name: str, **more: Any) -> Path:
    family, changes = EXPERT_VARIANTS[name]
    return tiny_model(family, **{**changes, **more})


def asked() -> list[list[int]]:
    """Prompts of which some share a beginning."""
    shared = prompts((40,))[0]
    return [*prompts((3, 37, 60)), *(shared + one for one in prompts((5, 9, 20)))]


def engine(directory: Path, **options: Any) -> EngineCore:
    base: dict[str, Any] = {"device": "cpu", "num_threads": 1, "max_model_len": 128, "block_size": 8, "max_num_seqs": 4}
    config = EngineConfig(model=str(directory), **{**base, "num_blocks": 200, **options})
    core = EngineCore(config, ModelInfo.from_directory(config.model), InProcessExecutor(config), KEY)
    core.start()
    return core


def generate(core: EngineCore, begun: int = 0, known: list[list[int]] | None = None) -> list[list[int]]:
    """The answers; `known`: each request goes on behind `begun` tokens that came elsewhere."""
    requests = [
        make_request(f"r{i}", prompt, max_tokens=MAX_TOKENS, temperature=0.0, ignore_eos=True)
        for i, prompt in enumerate(asked())
    ]
    if known is not None:
        requests = [
            replace(request, output_token_ids=tokens[:begun]) for request, tokens in zip(requests, known, strict=True)
        ]
    results = run(core, requests)
    assert_idle(core)
    return [results.tokens[request.request_id] for request in requests]


def judged(directory: Path) -> list[list[int]]:
    judge = hf_model(directory)
    return [hf_greedy(judge, prompt, MAX_TOKENS) for prompt in asked()]


def cached_chunked_and_preempted(name: str) -> None:
    few = {"num_blocks": 22, "hybrid_kv_cache": "off"}  # too few also where layers slide
    core = engine(model_of(name), max_num_batched_tokens=24, max_inflight_steps=3, **few)
    try:
        assert [generate(core), generate(core)] == [judged(model_of(name))] * 2
        stats = core.stats()
        assert stats.figures["prefix_cache_hits"] > 0
        assert stats.figures["preemptions"] > 0
    finally:
        core.shutdown()


def continued_elsewhere(name: str) -> None:
    expected = judged(model_of(name))
    core = engine(model_of(name), max_num_batched_tokens=16)
    try:
        for begun in (1, MAX_TOKENS - 2):
            assert generate(core, begun, expected) == [tokens[begun:] for tokens in expected]
    finally:
        core.shutdown()


def decoded_over_static_tensors(name: str) -> None:
    """Steps as CUDA graphs replay them: of four rows and of eight, so that some pad."""
    core = engine(model_of(name), max_num_seqs=7)
    assert isinstance(core.executor, InProcessExecutor)
    decode_statically(core.executor._worker, [4, 8])
    try:
        assert generate(core) == judged(model_of(name))
    finally:
        core.shutdown()


def cached_in_fp8(name: str) -> None:
    """Keys and values rounded by the judge too: with scales of 1, as the checkpoint has none. A number midway between
    two of fp8's goes the other way for an error in its last bit, so answers are compared up to the first near tie."""
    directory = model_of(name)
    judge = hf_model(directory)
    layers = judge.config.num_hidden_layers
    heads = 1 if hasattr(judge.config, "kv_lora_rank") else judge.config.num_key_value_heads  # latents are cached
    expected, sure = [], []
    for prompt in asked():
        cache = RoundedCache(judge.config, [torch.ones(2, heads)] * layers)
        token_ids, answer, gaps = prompt, [], []
        for _ in range(MAX_TOKENS):
            with torch.inference_mode():
                logits = judge(torch.tensor([token_ids]), past_key_values=cache, use_cache=True).logits
            first, second = logits[0, -1].topk(2).values.tolist()
            gaps.append(first - second)
            answer.append(int(logits[0, -1].argmax()))
            token_ids = answer[-1:]
        expected.append(answer)
        sure.append(next((n for n, gap in enumerate(gaps) if gap < NEAR_TIE), MAX_TOKENS))
    assert expected != judged(directory), "the rounding should show"
    core = engine(directory, kv_cache_dtype="fp8", max_num_batched_tokens=24)
    try:
        found = generate(core)
    finally:
        core.shutdown()
    assert sum(sure) > MAX_TOKENS * len(expected) / 2
    assert [own[:n] for own, n in zip(found, sure, strict=True)] == [
        answer[:n] for answer, n in zip(expected, sure, strict=True)
    ]


def held_to_a_grammar(name: str) -> None:
    directory = model_of(name, vocab_size=1100)
    pattern = r"([a-z]{2,4} ){2}[0-9]{2}"
    params = [
        SamplingParams(temperature=1.0, seed=seed, max_tokens=40, structured_outputs={"regex": pattern})
        for seed in range(4)
    ]
    options: dict[str, Any] = {"device": "cpu", "num_threads": 1, "num_blocks": 64, "max_num_batched_tokens": 16}
    with LLM(str(directory), tokenizer=str(ASSETS / "tiny-chat"), max_model_len=128, **options) as llm:
        answers = [answer.outputs[0].text for answer in llm.generate(["Answer: "] * 4, params, use_tqdm=False)]
    assert all(re.fullmatch(pattern, answer) for answer in answers), answers
    assert len(set(answers)) > 1


FEATURES: dict[str, Callable[[str], None]] = {
    check.__name__: check
    for check in (
        cached_chunked_and_preempted,
        continued_elsewhere,
        decoded_over_static_tensors,
        cached_in_fp8,
        held_to_a_grammar,
    )
}
CASES = [(name, feature) for name in EXPERT_VARIANTS for feature in FEATURES]
RNG = random.Random(23)
SAMPLE = [(RNG.choice(list(EXPERT_VARIANTS)), feature) for feature in FEATURES]
SAMPLE += [("deepseek_v3", feature) for feature in FEATURES]  # whose cache is of another kind than all others'


@pytest.mark.parametrize(
    ("name", "feature"),
    [pytest.param(*case, marks=() if case in SAMPLE else pytest.mark.slow, id="-".join(case)) for case in CASES],
)
def test_features(name: str, feature: str) -> None:
    FEATURES[feature](name)
