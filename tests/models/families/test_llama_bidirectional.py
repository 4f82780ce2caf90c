"""Llama that sees both ways, of the published layout; the judge is transformers' Llama under a mask that hides
nothing, pooled and divided as NVIDIA's code does it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaModel

from app.checkpoints.model_info import ASSETS, ModelInfo
from app.config.engine import EngineConfig
from app.errors import CheckpointError, UnsupportedError
from app.models.model_check import check_model
from app.records.pooling_info import PoolingInfo
from tests.hf_logprobs import prompts
from tests.worker.pooling.pooling_driver import PoolingDriver

TOKENIZER = str(ASSETS / "tiny-chat")
PROMPTS = prompts((1, 17, 3, 60, 33))
SIZES = {"hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "vocab_size": 512, "max_position_embeddings": 130}
POOLS = {
    "avg": lambda hidden: hidden.mean(0),
    "cls": lambda hidden: hidden[0],
    "last": lambda hidden: hidden[-1],
}


def published(directory: Path, kind: str, **changes: Any) -> LlamaModel:
    """Writes a random checkpoint; its decoder without a mask."""
    torch.manual_seed(0)
    judge = LlamaModel(LlamaConfig(**SIZES, initializer_range=0.3)).eval()  # type: ignore[arg-type]
    judge.save_pretrained(directory)
    file = directory / "config.json"
    own = {"architectures": [f"LlamaBidirectional{kind}"], "model_type": "llama_bidirec", **changes}
    file.write_text(json.dumps(json.loads(file.read_text()) | own))
    if kind == "ForSequenceClassification":
        weights = {f"model.{name}": tensor for name, tensor in load_file(directory / "model.safetensors").items()}
        torch.manual_seed(1)
        save_file(weights | {"score.weight": torch.randn(1, 48)}, directory / "model.safetensors")
    return judge


def hidden_states(judge: LlamaModel, prompt: list[int]) -> torch.Tensor:
    """Final hidden states [T, C] where every token sees all."""
    with torch.inference_mode():
        seen = torch.zeros(1, 1, len(prompt), len(prompt))
        return judge(torch.tensor([prompt]), attention_mask=seen).last_hidden_state[0]


@pytest.mark.parametrize("pooling", POOLS)
def test_embeddings(tmp_path: Path, pooling: str) -> None:
    judge = published(tmp_path, "Model", pooling=pooling)
    with PoolingDriver(tmp_path, tokenizer=TOKENIZER, max_model_len=128) as driver:
        found = driver.pool(PROMPTS, task="embed", use_activation=False)
    for prompt, vector in zip(PROMPTS, found, strict=True):
        np.testing.assert_allclose(vector, POOLS[pooling](hidden_states(judge, prompt)).numpy(), atol=1e-4)


@pytest.mark.parametrize("temperature", [1.0, 0.2])
def test_scores(tmp_path: Path, temperature: float) -> None:
    own = {"id2label": {"0": "LABEL_0"}, "temperature": temperature}
    judge = published(tmp_path, "ForSequenceClassification", pooling="avg", **own)
    weight = load_file(tmp_path / "model.safetensors")["score.weight"]
    with PoolingDriver(tmp_path, tokenizer=TOKENIZER, max_model_len=128) as driver:
        found = driver.pool(PROMPTS, task="classify", use_activation=False)
    expected = [(weight @ hidden_states(judge, prompt).mean(0) / temperature).numpy() for prompt in PROMPTS]
    np.testing.assert_allclose(np.stack(found), np.stack(expected), rtol=1e-4, atol=1e-4)


def test_refusals(tmp_path: Path) -> None:
    published(tmp_path, "Model", pooling="weighted")
    with pytest.raises(UnsupportedError, match="pooling='weighted'"):
        PoolingInfo.of(ModelInfo.from_directory(str(tmp_path)))
    published(tmp_path, "ForSequenceClassification", pooling=["avg"])
    with pytest.raises(CheckpointError, match="pooling"):
        check_model(EngineConfig(model=str(tmp_path)))
    published(tmp_path, "ForSequenceClassification", temperature=0)
    with pytest.raises(CheckpointError, match="temperature"):
        PoolingDriver(tmp_path, tokenizer=TOKENIZER)
