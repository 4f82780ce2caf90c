"""Writes tiny models of InternVL under the names of OpenGVLab's files, and beside them as transformers reads them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel

from tests.tiny_kimi import Rules, named

IMAGE_TEXT, IMAGE = "<IMG_CONTEXT>", 300
JUDGE = "judge"  # a folder in a model's directory
_NAMES: Rules = (
    (r"^model\.language_model\.", "language_model.model."),
    (r"^lm_head\.", "language_model.lm_head."),
    (r"^model\.multi_modal_projector\.layer_norm\.", "mlp1.0."),
    (r"^model\.multi_modal_projector\.linear_1\.", "mlp1.1."),
    (r"^model\.multi_modal_projector\.linear_2\.", "mlp1.3."),
    (r"^model\.vision_tower\.", "vision_model."),
    (r"\.encoder\.layer\.", ".encoder.layers."),
    (r"\.embeddings\.cls_token$", ".embeddings.class_embedding"),
    (r"\.embeddings\.patch_embeddings\.projection\.", ".embeddings.patch_embedding."),
    (r"\.embeddings\.position_embeddings$", ".embeddings.position_embedding"),
    (r"\.attention\.projection_layer\.", ".attn.proj."),
    (r"\.attention\.(q|k)_norm\.", r".attn.\1_norm."),
    (r"\.lambda_([12])$", r".ls\1"),
    (r"\.layernorm_before\.", ".norm1."),
    (r"\.layernorm_after\.", ".norm2."),
)


def write_internvl_chat(model: PreTrainedModel, directory: Path) -> None:
    """Write transformers' InternVL: config.json, a file of tensors, and the ids of added tokens; its own in JUDGE."""
    model.save_pretrained(directory / JUDGE)
    (directory / "config.json").write_text(json.dumps(_config(model)))
    (directory / "added_tokens.json").write_text(json.dumps({IMAGE_TEXT: IMAGE}))
    found, parts = dict[str, torch.Tensor](), dict[str, list[torch.Tensor]]()
    for name, x in model.state_dict().items():
        if part := re.search(r"vision_tower.*\.attention\.[qkv]_proj\.", name):
            own = re.sub(r"\.attention\.[qkv]_proj\.", ".attn.qkv.", part.group()) + name[part.end() :]
            parts.setdefault(named("model." + own, _NAMES), []).append(x)
        elif not name.endswith("mask_token"):
            found[named(name, _NAMES)] = x.contiguous()
    found |= {name: torch.cat(three) for name, three in parts.items()}
    save_file(found, directory / "model.safetensors", {"format": "pt"})


def _config(model: PreTrainedModel) -> dict[str, Any]:
    whole = model.config.to_dict()
    text, vision = whole["text_config"], whole["vision_config"]
    return {
        **{"architectures": ["InternVLChatModel"], "model_type": "internvl_chat", "ps_version": "v2"},
        **{"select_layer": -1, "downsample_ratio": 0.5, "force_image_size": vision["image_size"][0]},
        **{"min_dynamic_patch": 1, "max_dynamic_patch": 3, "dynamic_image_size": True, "use_thumbnail": True},
        "llm_config": {**text, "architectures": ["Qwen2ForCausalLM"]},
        "vision_config": {
            **{"model_type": "intern_vit_6b", "hidden_act": "gelu", "norm_type": vision["norm_type"]},
            **{name: vision[name][0] for name in ("image_size", "patch_size")},
            **{name: vision[name] for name in ("hidden_size", "intermediate_size", "layer_norm_eps")},
            **{name: vision[name] for name in ("num_hidden_layers", "num_attention_heads")},
            **{"qkv_bias": vision["attention_bias"], "qk_normalization": vision["use_qk_norm"]},
        },
    }
