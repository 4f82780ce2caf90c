"""Rotary frequencies of every rope_type equal transformers'; the rotation equals its textbook form."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from app.errors import CheckpointError, UnsupportedError
from app.layers.rope_scaling import RopeSettings
from app.layers.rotary import RotaryEmbedding

SCALINGS: list[dict[str, Any]] = [
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 3.0},
    {"rope_type": "proportional", "partial_rotary_factor": 0.25},
    {"rope_type": "proportional", "partial_rotary_factor": 0.5, "factor": 2.0},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    },
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
    {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 128,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "truncate": False,
        "mscale": 1.2,
        "mscale_all_dim": 0.8,
    },
    {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 256, "attention_factor": 1.5},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "partial_rotary_factor": 0.5},
    {
        "rope_type": "longrope",
        "original_max_position_embeddings": 512,
        "factor": 4.0,
        "short_factor": [1.0 + i / 10 for i in range(40)],
        "long_factor": [2.0 + i / 5 for i in range(40)],
    },
]


def hf_config(scaling: dict[str, Any]) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=160,
        num_attention_heads=2,
        head_dim=80,
        max_position_embeddings=512,
        rope_parameters={"rope_theta": 5000.0, **scaling},
    )


@pytest.mark.parametrize("scaling", SCALINGS, ids=lambda s: f"{s['rope_type']}-{len(s)}")
@pytest.mark.parametrize("style", ["rope_parameters", "rope_scaling"])
def test_frequencies(scaling: dict[str, Any], style: str) -> None:
    reference = hf_config(dict(scaling))
    if scaling["rope_type"] == "default":
        expected, factor = LlamaRotaryEmbedding.compute_default_rope_parameters(reference)
    else:
        expected, factor = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](reference, torch.device("cpu"))
    ours: dict[str, Any] = {"max_position_embeddings": 512}
    if style == "rope_parameters":
        ours["rope_parameters"] = {"rope_theta": 5000.0, **scaling}
    else:  # before transformers 5
        ours |= {"rope_theta": 5000.0, "rope_scaling": {**scaling, "type": scaling["rope_type"]}}
    found, scale = RopeSettings.from_hf(ours, 80, 512).frequencies()
    assert scale == pytest.approx(factor)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_rotation() -> None:
    scaling = SCALINGS[3]
    positions = torch.tensor([0, 1, 5, 511, 17])
    query, key = torch.randn(2, 5, 2, 80).unbind(0)  # [T, H, D]
    rotary = LlamaRotaryEmbedding(hf_config(dict(scaling)))
    cos, sin = rotary(query, positions[None])
    expected = apply_rotary_pos_emb(query.transpose(0, 1)[None], key.transpose(0, 1)[None], cos, sin)
    settings = RopeSettings.from_hf(
        {"rope_parameters": {"rope_theta": 5000.0, **scaling}, "max_position_embeddings": 512}, 80, 512
    )
    rotation = RotaryEmbedding(settings, 512, torch.float32, torch.device("cpu")).at(positions)
    for ours, theirs in zip((query, key), expected, strict=True):
        torch.testing.assert_close(rotation.apply(ours), theirs[0].transpose(0, 1), rtol=1e-5, atol=1e-5)


def test_dynamic_is_refused_only_where_it_would_change_something() -> None:
    config = {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}, "max_position_embeddings": 512}
    settings = RopeSettings.from_hf(config, 64, 512)
    default = RopeSettings.from_hf({"max_position_embeddings": 512}, 64, 512)
    assert torch.equal(settings.frequencies()[0], default.frequencies()[0])
    with pytest.raises(UnsupportedError, match="max_model_len to at most 512"):
        RopeSettings.from_hf(config, 64, 513).frequencies()


def test_what_is_missing_or_unsupported_is_named() -> None:
    with pytest.raises(CheckpointError, match="'linear' needs 'factor'"):
        RopeSettings.from_hf({"rope_scaling": {"type": "linear"}}, 64, 512).frequencies()
    with pytest.raises(UnsupportedError, match=r"partial_rotary_factor 0\.55 rotates 35 of 64"):
        RopeSettings.from_hf({"partial_rotary_factor": 0.55}, 64, 512)
    with pytest.raises(UnsupportedError, match=r"partial_rotary_factor 2\.0 rotates 128 of 64"):
        RopeSettings.from_hf({"partial_rotary_factor": 2}, 64, 512)
    with pytest.raises(CheckpointError, match="lack 'sliding_attention'"):
        RopeSettings.from_hf({"rope_parameters": {"full_attention": {}}}, 64, 512, "sliding_attention")
    with pytest.raises(CheckpointError, match="'longrope' needs 32 numbers in 'short_factor'"):
        RopeSettings.from_hf({"rope_parameters": {"rope_type": "longrope"}}, 64, 512).frequencies()
