"""Greedy tokens and logits of every family equal transformers', at odd shapes, chunked or not, alone or in a batch."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from tests.tiny_models import hf_greedy, hf_model, tiny_model
from tests.worker.worker_driver import Driver, Run, all_logits, greedy

MAX_TOKENS = 10
# GQA groups of 1, 2 and 7; head sizes 80, 32 and 128.
SHAPES: dict[str, dict[str, Any]] = {
    "mha-80": {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 80},
    "gqa2-32": {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32},
    "gqa7-128": {"num_attention_heads": 7, "num_key_value_heads": 1, "head_dim": 128, "hidden_size": 112},
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-biased-tied": ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "llama-rope3": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500.0,
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "qwen2": ("qwen2", {}),
    "qwen2-windows": ("qwen2", {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}),
    "qwen3": ("qwen3", {}),
    "qwen3-windows": (
        "qwen3",
        {
            "use_sliding_window": True,
            "sliding_window": 9,
            "layer_types": ["sliding_attention", "full_attention"],
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    "mistral": ("mistral", {"sliding_window": 20}),
    "mistral-unbounded": ("mistral", {"sliding_window": None}),
}
# Every shape and every family; not every pair of them.
CASES = [
    ("llama", "mha-80"),
    ("llama", "gqa2-32"),
    ("llama", "gqa7-128"),
    ("llama-biased-tied", "gqa2-32"),
    ("llama-rope3", "gqa7-128"),
    ("qwen2", "mha-80"),
    ("qwen2", "gqa7-128"),
    ("qwen2-windows", "gqa2-32"),
    ("qwen3", "gqa7-128"),
    ("qwen3-windows", "mha-80"),
    ("mistral", "gqa7-128"),
    ("mistral", "mha-80"),
    ("mistral-unbounded", "gqa2-32"),
]


def prompts(count: int, lengths: tuple[int, ...], vocab_size: int = 331) -> list[list[int]]:
    rng = random.Random(7)
    return [[rng.randrange(3, vocab_size) for _ in range(lengths[i % len(lengths)])] for i in range(count)]


@pytest.fixture(params=CASES, ids="/".join, scope="module")
def case(request: pytest.FixtureRequest) -> tuple[str, PreTrainedModel]:
    family, changes = FAMILIES[request.param[0]]
    directory = tiny_model(family, **{**changes, **SHAPES[request.param[1]]})
    return str(directory), hf_model(directory)


def test_greedy_tokens(case: tuple[str, PreTrainedModel]) -> None:
    directory, reference = case
    asked = prompts(6, (1, 15, 16, 17, 33, 48))  # before, on and after the edge of a block of 16
    expected = [hf_greedy(reference, prompt, MAX_TOKENS) for prompt in asked]
    assert len({tuple(tokens) for tokens in expected}) == len(asked), "the model says the same whatever it is asked"
    for chunk in (10_000, 7):
        together = Driver(directory, chunk=chunk).run([Run(prompt, greedy(MAX_TOKENS)) for prompt in asked])
        assert [run.tokens for run in together] == expected, f"chunk {chunk}"
    driver = Driver(directory)
    alone = [driver.run([Run(prompt, greedy(MAX_TOKENS))])[0].tokens for prompt in asked]
    assert alone == expected


def test_logits(case: tuple[str, PreTrainedModel]) -> None:
    """All logits of a prompt, over two chunks, through the worker's own inputs."""
    directory, reference = case
    prompt = prompts(1, (37,))[0]
    with torch.inference_mode():
        expected = reference(torch.tensor([prompt])).logits[0]
    found = all_logits(Driver(directory, chunk=20), prompt)
    assert found.shape == expected.shape
    assert (found - expected).abs().max() < 1e-3


def test_batch_of_32() -> None:
    directory = tiny_model("qwen3", **SHAPES["gqa7-128"])
    reference = hf_model(directory)
    asked = prompts(32, (3, 16, 21, 47, 64))
    runs = Driver(str(directory), chunk=24, block_size=8).run([Run(prompt, greedy(6)) for prompt in asked])
    assert [run.tokens for run in runs] == [hf_greedy(reference, prompt, 6) for prompt in asked]


def test_logprobs_of_named_tokens() -> None:
    """At each position of an answer, beside a request that asks for the most likely."""
    directory = tiny_model("qwen3", **SHAPES["gqa7-128"])
    prompt, other = prompts(2, (17, 9))
    named = (330, 3, 77, 12)
    asked = [Run(prompt, greedy(6, logprobs=0, logprob_token_ids=named)), Run(other, greedy(6, logprobs=2))]
    runs = Driver(str(directory)).run(asked)
    with torch.inference_mode():
        logits = hf_model(directory)(torch.tensor([prompt + runs[0].tokens])).logits[0, len(prompt) - 1 : -1]
    exact = torch.log_softmax(logits.float(), dim=-1)
    for token, line, entry in zip(runs[0].tokens, exact, runs[0].logprobs, strict=True):
        assert entry.token_ids == [token, *named]
        assert entry.logprobs == pytest.approx(line[entry.token_ids].tolist(), abs=1e-4)
        assert entry.ranks == [int((line > line[i]).sum()) + 1 for i in entry.token_ids]
    assert all(entry.ranks == [1, 1, 2] for entry in runs[1].logprobs)


def test_bfloat16_checkpoint_computed_in_float32() -> None:
    directory = tiny_model("llama", dtype="bfloat16")
    reference = hf_model(directory)
    driver = Driver(str(directory))
    assert driver.info.dtype == "float32"
    for prompt in prompts(3, (5, 18)):
        assert driver.run([Run(prompt, greedy(8))])[0].tokens == hf_greedy(reference, prompt, 8)


def test_bfloat16_compute_stays_close() -> None:
    """Half precision need not give the same tokens, but logprobs must stay near."""
    directory = tiny_model("llama", initializer_range=0.05)
    prompt = prompts(1, (30,))[0]
    runs = [
        Driver(str(directory), dtype=dtype).run([Run(prompt, greedy(1, prompt_logprobs=0))])[0]
        for dtype in ("float32", "bfloat16")
    ]
    exact, rounded = ([entry.logprobs[0] for entry in run.prompt_logprobs] for run in runs)
    assert max(abs(a - b) for a, b in zip(exact, rounded, strict=True)) < 0.15
