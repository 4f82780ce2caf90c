"""Voyage 4 nano of its published layout; the judge is transformers' Qwen3 under a mask that hides nothing, its states
through the linear layer token by token, and the mean of that."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3Config, Qwen3Model

from app.checkpoints.model_info import ASSETS, ModelInfo
from app.errors import CheckpointError
from app.records.pooling_info import PoolingInfo
from tests.hf_logprobs import prompts
from tests.worker.pooling.pooling_driver import PoolingDriver

TOKENIZER = str(ASSETS / "tiny-chat")
PROMPTS = prompts((1, 17, 3, 60, 33))
SIZES = {"hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 16}
SIZES |= {"num_key_value_heads": 2, "vocab_size": 512, "max_position_embeddings": 130}
WIDTH = 80


def published(directory: Path, **changes: Any) -> Qwen3Model:
    """Writes a random checkpoint; its decoder without a mask."""
    torch.manual_seed(0)
    judge = Qwen3Model(Qwen3Config(**SIZES, initializer_range=0.3)).eval()  # type: ignore[arg-type]
    judge.save_pretrained(directory)
    file = directory / "config.json"
    own = {"architectures": ["VoyageQwen3BidirectionalEmbedModel"], "num_labels": WIDTH, **changes}
    file.write_text(json.dumps(json.loads(file.read_text()) | own))
    weights = {f"model.{name}": tensor for name, tensor in load_file(directory / "model.safetensors").items()}
    torch.manual_seed(1)
    save_file(weights | {"linear.weight": torch.randn(WIDTH, 48)}, directory / "model.safetensors")
    return judge


@pytest.mark.parametrize("packed", [False, True])
def test_embeddings(tmp_path: Path, packed: bool) -> None:
    judge = published(tmp_path)
    if packed:
        kinds = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize"}
        own = [{"type": f"sentence_transformers.models.{kind}", "path": path} for kind, path in kinds.items()]
        (tmp_path / "modules.json").write_text(json.dumps(own))
        (tmp_path / "1_Pooling").mkdir()
        (tmp_path / "1_Pooling/config.json").write_text(json.dumps({"pooling_mode_mean_tokens": True}))
    weight = load_file(tmp_path / "model.safetensors")["linear.weight"]
    with PoolingDriver(tmp_path, tokenizer=TOKENIZER, max_model_len=128) as driver:
        found = driver.pool(PROMPTS, task="embed")
    for prompt, vector in zip(PROMPTS, found, strict=True):
        with torch.inference_mode():
            seen = torch.zeros(1, 1, len(prompt), len(prompt))
            hidden = judge(torch.tensor([prompt]), attention_mask=seen).last_hidden_state[0]
            expected = torch.nn.functional.normalize((hidden @ weight.T).mean(0), dim=0)
        np.testing.assert_allclose(vector, expected.numpy(), atol=1e-4)


def test_the_width_of_its_vectors_must_be_told(tmp_path: Path) -> None:
    published(tmp_path, num_labels=None)
    with pytest.raises(CheckpointError, match="num_labels"):
        PoolingInfo.of(ModelInfo.from_directory(str(tmp_path)))
