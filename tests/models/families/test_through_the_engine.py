"""100 prompts through LLM equal transformers' generate, for the built-in model and every family at odd shapes:
chunked or not, cached or not, batched 1 and 32, one and two steps in flight."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from app import LLM, SamplingParams
from app.checkpoints.model_info import ASSETS
from tests.tiny_models import hf_greedy, hf_model, tiny_model

TINY_CHAT = ASSETS / "tiny-chat"
PROMPTS, MAX_TOKENS, BLOCK = 100, 6, 8
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"num_attention_heads": 7, "num_key_value_heads": 1, "head_dim": 32, "hidden_size": 112}),
    "qwen2": ("qwen2", {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 128}),
    "qwen3": ("qwen3", {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 80}),
    "mistral": ("mistral", {"sliding_window": 13, "head_dim": 80}),
}
Case = tuple[str, list[list[int]], list[list[int]]]  # directory, prompts, transformers' answers


@pytest.fixture(params=["tiny-chat", *MODELS], scope="module")
def case(request: pytest.FixtureRequest) -> Case:
    name: str = request.param
    directory = TINY_CHAT if name == "tiny-chat" else tiny_model(MODELS[name][0], **MODELS[name][1])
    rng = random.Random(2)
    # Pairs share a prefix; lengths lie before, on and after block edges.
    prompts: list[list[int]] = []
    for i in range(PROMPTS // 2):
        shared = [rng.randrange(3, 331) for _ in range(1 + i)]
        prompts += [shared, shared[: 2 * len(shared) // 3] + [rng.randrange(3, 331) for _ in range(1 + i % 9)]]
    reference = hf_model(Path(directory))
    return str(directory), prompts, [hf_greedy(reference, prompt, MAX_TOKENS) for prompt in prompts]


@pytest.mark.parametrize(
    "options",
    [
        {"max_inflight_steps": 1, "max_num_seqs": 1, "enable_prefix_caching": False},
        {"max_inflight_steps": 1, "max_num_seqs": 32, "max_num_batched_tokens": 48},
        {"max_inflight_steps": 2, "max_num_seqs": 32},
        {"max_inflight_steps": 2, "max_num_seqs": 32, "max_num_batched_tokens": 48, "enable_prefix_caching": False},
    ],
    ids=lambda options: "-".join(str(value) for value in options.values()),
)
def test_100_prompts(case: Case, options: dict[str, Any]) -> None:
    directory, prompts, expected = case
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
    base: dict[str, Any] = {"device": "cpu", "num_threads": 1, "num_blocks": 1000, "block_size": BLOCK}
    with LLM(directory, tokenizer=str(TINY_CHAT), **base, **options) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        assert [list(output.outputs[0].token_ids) for output in outputs] == expected
        if options.get("enable_prefix_caching", True):
            outputs = llm.generate(prompts, params, use_tqdm=False)
            assert [list(output.outputs[0].token_ids) for output in outputs] == expected
            assert all(output.num_cached_tokens > 0 for output in outputs if len(output.prompt_token_ids) > BLOCK)
