"""Embeddings of decoders, in chunks and through the prefix cache; transformers is the judge."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from app.layers.attention import Attention
from tests.engine.core_driver import assert_idle
from tests.tiny_encoders import add_modules, hf_encoder, tiny_encoder
from tests.tiny_models import hf_model, tiny_model
from tests.worker.pooling.pooling_driver import PoolingDriver

MODES = ("cls_token", "lasttoken", "max_tokens", "mean_tokens", "mean_sqrt_len_tokens")
RNG = np.random.default_rng(3)
PROMPTS = [RNG.integers(4, 300, length).tolist() for length in (1, 15, 16, 17, 70, 33, 90, 5)]


def expected(mode: str, hidden: torch.Tensor) -> torch.Tensor:
    """The definition of each mode over [T, C]."""
    found = {
        "cls_token": hidden[0],
        "lasttoken": hidden[-1],
        "max_tokens": hidden.max(0).values,
        "mean_tokens": hidden.mean(0),
        "mean_sqrt_len_tokens": hidden.sum(0) / len(hidden) ** 0.5,
    }
    return found[mode]


@pytest.fixture(scope="module")
def hidden() -> list[torch.Tensor]:
    """transformers' last hidden states of PROMPTS."""
    model = hf_encoder(tiny_encoder("qwen3"))
    with torch.inference_mode():
        return [model(torch.tensor([prompt])).last_hidden_state[0] for prompt in PROMPTS]


@pytest.mark.parametrize("mode", MODES)
def test_prompts_in_chunks(mode: str, hidden: list[torch.Tensor], tmp_path: Path) -> None:
    """A step holds 24 tokens, so that most prompts come in several; blocks are few, so that some wait."""
    directory = tmp_path / "model"
    shutil.copytree(tiny_encoder("qwen3"), directory)
    add_modules(directory, {f"pooling_mode_{mode}": True})
    options = {"max_num_batched_tokens": 24, "block_size": 8, "num_blocks": 16, "max_model_len": 100}
    with PoolingDriver(directory, **options) as driver:
        for _ in range(2):  # the second time with whatever the prefix cache holds
            found = driver.pool(PROMPTS, use_activation=False)
            for result, states in zip(found, hidden, strict=True):
                np.testing.assert_allclose(result, expected(mode, states).numpy(), atol=2e-4)
        assert_idle(driver.core)


@pytest.mark.parametrize("mode", MODES)
def test_prompts_in_one_pass(
    mode: str, hidden: list[torch.Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is cached where prefixes are not kept: a step holds whole prompts, and blocks are numbers."""
    monkeypatch.delattr(Attention, "_write_heads")  # where keys and values would go into the cache
    directory = tmp_path / "model"
    shutil.copytree(tiny_encoder("qwen3"), directory)
    add_modules(directory, {f"pooling_mode_{mode}": True})
    options = {"max_num_batched_tokens": 128, "max_model_len": 100, "enable_prefix_caching": False}
    with PoolingDriver(directory, **options) as driver:
        for _ in range(2):
            found = driver.pool(PROMPTS, use_activation=False)
            for result, states in zip(found, hidden, strict=True):
                np.testing.assert_allclose(result, expected(mode, states).numpy(), atol=2e-4)
        assert_idle(driver.core)


@pytest.mark.parametrize("options", [{}, {"executor": "local_processes", "tensor_parallel_size": 2}], ids=["1", "2"])
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2"])
def test_other_decoders_in_one_pass(family: str, options: dict[str, Any]) -> None:
    """Mistral's tokens see a window."""
    directory = tiny_model(family)
    model = hf_model(directory)
    own = {"runner": "pooling", "enable_prefix_caching": False, "max_model_len": 128, **options}
    with PoolingDriver(directory, tokenizer=str(tiny_encoder("qwen3")), **own) as driver:
        found = driver.pool(PROMPTS, use_activation=False)
    with torch.inference_mode():
        for result, prompt in zip(found, PROMPTS, strict=True):
            states = model(torch.tensor([prompt]), output_hidden_states=True).hidden_states[-1][0, -1]
            np.testing.assert_allclose(result, states.numpy(), atol=2e-3, rtol=1e-3)


def test_the_last_token_needs_only_what_is_not_cached(hidden: list[torch.Tensor]) -> None:
    with PoolingDriver(tiny_encoder("qwen3"), block_size=8, num_blocks=128, max_model_len=100) as driver:
        driver.pool(PROMPTS)
        before = driver.core.stats().figures["prefix_cache_hits"]
        again = driver.pool(PROMPTS, use_activation=False)
        assert driver.core.stats().figures["prefix_cache_hits"] > before
        tokens = driver.pool(PROMPTS, task="token_embed", use_activation=False)
        assert driver.core.stats().figures["prefix_cache_hits"] - before < 2 * sum(map(len, PROMPTS))
    for last, each, states in zip(again, tokens, hidden, strict=True):
        np.testing.assert_allclose(last, states[-1].numpy(), atol=2e-4)
        np.testing.assert_allclose(each, states.numpy(), atol=2e-4)


def test_embeddings_have_length_1_unless_asked_otherwise(hidden: list[torch.Tensor]) -> None:
    with PoolingDriver(tiny_encoder("qwen3"), max_model_len=100) as driver:
        for result, states in zip(driver.pool(PROMPTS), hidden, strict=True):
            unit = torch.nn.functional.normalize(states[-1], dim=0)
            np.testing.assert_allclose(result, unit.numpy(), atol=1e-5)


def test_a_model_that_generates_gives_embeddings_when_asked() -> None:
    directory = tiny_model("llama")
    assert json.loads((directory / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    model = hf_model(directory)
    with PoolingDriver(directory, runner="pooling", tokenizer=str(tiny_encoder("qwen3"))) as driver:
        found = driver.pool(PROMPTS, use_activation=False)
    with torch.inference_mode():
        for result, prompt in zip(found, PROMPTS, strict=True):
            states = model(torch.tensor([prompt]), output_hidden_states=True).hidden_states[-1][0, -1]
            np.testing.assert_allclose(result, states.numpy(), atol=2e-3, rtol=1e-3)


@pytest.mark.parametrize("both_ways", [False, True])
def test_code_of_its_own_that_is_not_run_is_told(both_ways: bool, tmp_path: Path) -> None:
    """GritLM and others see the whole text, and config.json does not say it."""
    shutil.copytree(tiny_encoder("qwen3"), tmp_path / "model")
    file = tmp_path / "model/config.json"
    own = {"auto_map": {"AutoModel": "modeling_own.OwnModel"}} | ({"is_causal": False} if both_ways else {})
    file.write_text(json.dumps(json.loads(file.read_text()) | own))
    with PoolingDriver(tmp_path / "model", max_model_len=128) as driver:
        told = [note for note in driver.worker_info.notes if "modeling_own.OwnModel" in note]
    assert len(told) == (not both_ways)
