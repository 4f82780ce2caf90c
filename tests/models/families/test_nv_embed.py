"""NV-Embed in its published layout; the judge is transformers' Mistral under a mask that hides nothing, and behind it
plain matrices."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from transformers import MistralConfig, MistralModel

from app.checkpoints.model_info import ASSETS
from app.errors import CheckpointError, UnsupportedError
from tests.hf_logprobs import prompts
from tests.models.families.published import Page, heads
from tests.tiny_encoders import add_modules
from tests.worker.pooling.pooling_driver import PoolingDriver

TOKENIZER = str(ASSETS / "tiny-chat")
PROMPTS = prompts((1, 17, 3, 60, 33))
SIZE, LATENTS, HEADS, DIM = 48, 10, 4, 20
TEXT: dict[str, Any] = {"hidden_size": SIZE, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4}
TEXT |= {"num_key_value_heads": 2, "vocab_size": 512, "max_position_embeddings": 130, "sliding_window": 8}
BEHIND = {"num_latents_value": LATENTS, "num_cross_heads": HEADS, "cross_dim_head": DIM, "hidden_dim": SIZE}
BEHIND |= {"latent_dim": SIZE, "model_type": "latent_attention"}
ATTENDS, FEEDS = "cross_attend_blocks.0", "cross_attend_blocks.1"


def published(directory: Path, **changes: Any) -> MistralModel:
    """Writes a random checkpoint; its decoder without a mask."""
    torch.manual_seed(0)
    judge = MistralModel(MistralConfig(**{**TEXT, "sliding_window": None}, initializer_range=0.3)).eval()
    shapes = {"latents": (LATENTS, SIZE), f"{ATTENDS}.fn.to_q.weight": (HEADS * DIM, SIZE)}
    shapes |= {
        f"{ATTENDS}.fn.to_kv.weight": (2 * HEADS * DIM, SIZE),
        f"{ATTENDS}.fn.to_out.weight": (SIZE, HEADS * DIM),
    }
    shapes |= {f"{FEEDS}.fn.net.0.weight": (8 * SIZE, SIZE), f"{FEEDS}.fn.net.2.weight": (SIZE, 4 * SIZE)}
    drawn = {name: torch.randn(shape) * 0.2 for name, shape in shapes.items()}
    drawn |= {f"{FEEDS}.fn.net.0.bias": torch.randn(8 * SIZE) * 0.2, f"{FEEDS}.fn.net.2.bias": torch.randn(SIZE) * 0.2}
    for norm in (f"{ATTENDS}.norm", f"{ATTENDS}.norm_context", f"{FEEDS}.norm"):
        drawn |= {f"{norm}.weight": 1 + torch.randn(SIZE) * 0.2, f"{norm}.bias": torch.randn(SIZE) * 0.2}
    tensors = {f"embedding_model.{name}": tensor for name, tensor in judge.state_dict().items()}
    save_file(tensors | {f"latent_attention_model.{name}": one for name, one in drawn.items()},
              directory / "model.safetensors")  # fmt: skip
    text = {**TEXT, "model_type": "bidir_mistral", "rms_norm_eps": 1e-6, "rope_theta": 10_000.0, "hidden_act": "silu"}
    config = {"architectures": ["NVEmbedModel"], "model_type": "nvembed", "add_eos": True, "text_config": text}
    (directory / "config.json").write_text(json.dumps(config | {"latent_attention_config": BEHIND} | changes))
    return judge


def vectors(directory: Path, judge: MistralModel, prompt: list[int]) -> torch.Tensor:
    """Of the tokens [T, C]."""
    begin = "latent_attention_model."
    found = load_file(directory / "model.safetensors")
    page = Page({name.removeprefix(begin): one for name, one in found.items() if name.startswith(begin)}, BEHIND)
    with torch.inference_mode():
        seen = torch.zeros(1, 1, len(prompt), len(prompt))
        x = judge(torch.tensor([prompt]), attention_mask=seen).last_hidden_state[0]
    q = page.linear(f"{ATTENDS}.fn.to_q", page.layer_norm(f"{ATTENDS}.norm", x, 1e-5))
    context = page.layer_norm(f"{ATTENDS}.norm_context", page.tensors["latents"], 1e-5)
    k, v = page.linear(f"{ATTENDS}.fn.to_kv", context).chunk(2, -1)
    q, k, v = (heads(one, DIM) for one in (q, k, v))
    attended = ((q @ k.transpose(1, 2) / DIM**0.5).softmax(-1) @ v).transpose(0, 1).flatten(1)
    x = x + page.linear(f"{ATTENDS}.fn.to_out", attended)
    up, gate = page.linear(f"{FEEDS}.fn.net.0", page.layer_norm(f"{FEEDS}.norm", x, 1e-5)).chunk(2, -1)
    return x + page.linear(f"{FEEDS}.fn.net.2", up * F.gelu(gate))


@pytest.mark.parametrize("options", [{}, {"executor": "local_processes", "tensor_parallel_size": 2}], ids=["1", "2"])
def test_vectors(tmp_path: Path, options: dict[str, Any]) -> None:
    judge = published(tmp_path)
    with PoolingDriver(tmp_path, tokenizer=TOKENIZER, max_model_len=128, **options) as driver:
        found = driver.pool(PROMPTS, task="embed")
        skipped = driver.pool([PROMPTS[3], PROMPTS[4]], task="embed", num_skipped=9)
    for prompt, vector in zip(PROMPTS, found, strict=True):
        expected = F.normalize(vectors(tmp_path, judge, prompt).mean(0), dim=0)
        np.testing.assert_allclose(vector, expected.numpy(), atol=1e-4)
    for prompt, vector in zip(PROMPTS[3:], skipped, strict=True):
        expected = F.normalize(vectors(tmp_path, judge, prompt)[9:].mean(0), dim=0)
        np.testing.assert_allclose(vector, expected.numpy(), atol=1e-4)


def test_a_directory_of_sentence_transformers(tmp_path: Path) -> None:
    published(tmp_path)
    pooling = {"word_embedding_dimension": SIZE, "pooling_mode_mean_tokens": True, "include_prompt": False}
    add_modules(tmp_path, pooling)
    with PoolingDriver(tmp_path, tokenizer=TOKENIZER, max_model_len=128) as driver:
        assert driver.pooling.skips_prompt
        assert driver.pooling.pooling == "mean"


def test_what_cannot_be(tmp_path: Path) -> None:
    published(tmp_path, latent_attention_config={**BEHIND, "latent_dim": 24})
    with pytest.raises(UnsupportedError, match="latent_dim=24 beside hidden_size=48"):
        PoolingDriver(tmp_path, tokenizer=TOKENIZER)
    published(tmp_path, latent_attention_config={**BEHIND, "num_cross_heads": "many"})
    with pytest.raises(CheckpointError, match="num_cross_heads"):
        PoolingDriver(tmp_path, tokenizer=TOKENIZER)
