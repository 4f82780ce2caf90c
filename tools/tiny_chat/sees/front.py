"""The checkpoint: transformers' LLaVA over the weights of `tiny-chat`, its tower and projector in a file of theirs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import LlavaConfig, LlavaForConditionalGeneration

from tools.tiny_chat.sees.rows import ASSETS, IMAGE_TOKEN, NUM_TOKENS, PATCH, SIDE

FRONT = "front.safetensors"
MEAN = STD = 0.5  # of each channel
TOWER = {
    **{"model_type": "clip_vision_model", "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4},
    **{"num_attention_heads": 4, "image_size": SIDE, "patch_size": PATCH, "num_channels": 3, "projection_dim": 128},
    **{"hidden_act": "gelu", "layer_norm_eps": 1e-5, "attention_dropout": 0.0},
}


def config() -> dict[str, Any]:
    """config.json."""
    text = json.loads((ASSETS / "tiny-chat" / "config.json").read_text(encoding="utf-8"))
    text = {name: value for name, value in text.items() if name not in ("architectures", "torch_dtype")}
    return {
        "architectures": ["LlavaForConditionalGeneration"],
        "model_type": "llava",
        "image_token_index": IMAGE_TOKEN,
        "image_seq_length": NUM_TOKENS,
        "projector_hidden_act": "gelu",
        "multimodal_projector_bias": True,
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "default",
        "tie_word_embeddings": True,
        **{name: text[name] for name in ("eos_token_id", "pad_token_id")},
        "dtype": "bfloat16",
        "vision_config": TOWER,
        "text_config": text,
    }


def build(front: Path | None = None) -> LlavaForConditionalGeneration:
    """The model in fp32: the text's weights as shipped, the front's from a file or as they begin."""
    model = LlavaForConditionalGeneration(LlavaConfig(**config())).float()
    text = load_file(ASSETS / "tiny-chat" / "model.safetensors")
    own = {name.removeprefix("model."): tensor.float() for name, tensor in text.items()}
    model.model.language_model.load_state_dict(own)
    model.tie_weights()
    for one in model.model.language_model.parameters():
        one.requires_grad_(False)
    if front is not None:
        missing = model.load_state_dict({k: v.float() for k, v in named(load_file(front)).items()}, strict=False)
        assert not missing.unexpected_keys, missing.unexpected_keys
    return model


def parts(model: LlavaForConditionalGeneration) -> dict[str, torch.Tensor]:
    """What is trained, under the names of published checkpoints."""
    state = model.state_dict()
    return {
        name.removeprefix("model."): tensor
        for name, tensor in state.items()
        if name.startswith(("model.vision_tower.", "model.multi_modal_projector.")) and "position_ids" not in name
    }


def named(stored: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Published names as transformers' modules have them."""
    return {f"model.{name}": tensor for name, tensor in stored.items()}


def save(model: LlavaForConditionalGeneration, directory: Path) -> Path:
    """Write the front in bf16."""
    directory.mkdir(parents=True, exist_ok=True)
    own = {name: tensor.detach().to("cpu", torch.bfloat16).contiguous() for name, tensor in parts(model).items()}
    save_file(own, directory / FRONT, {"format": "pt"})
    return directory / FRONT
