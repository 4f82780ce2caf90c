"""Writes tiny models of Kimi K2.5 under the names of Moonshot's files: those that transformers saves it does not read
again."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

Rules = Sequence[tuple[str, str]]
_NAMES: Rules = (
    (r"^model\.", ""),
    (r"^vision_tower\.(layers|final_layernorm)\.", r"vision_tower.encoder.\1."),
    (r"\.encoder\.layers\.", ".encoder.blocks."),
    (r"\.pos_emb\.position_embeddings$", ".pos_emb.weight"),
    (r"\.attn\.proj\.", ".wo."),
    (r"\.norm1\.", ".norm0."),
    (r"\.norm2\.", ".norm1."),
    (r"\.mlp\.fc1\.", ".mlp.fc0."),
    (r"\.mlp\.fc2\.", ".mlp.fc1."),
    (r"^mm_projector\.in_proj\.", "mm_projector.proj.0."),
    (r"^mm_projector\.out_proj\.", "mm_projector.proj.2."),
)


def write_kimi(model: PreTrainedModel, directory: Path) -> None:
    """Write transformers' Kimi K2.5."""
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(directory)
    save_file({**_text(model), **_eyes(model)}, directory / "model.safetensors", {"format": "pt"})


def named(name: str, rules: Rules) -> str:
    """The name after all rules."""
    for pattern, own in rules:
        name = re.sub(pattern, own, name)
    return name


def _text(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """As DeepSeek V3 is saved, under a name of its own."""
    text = AutoModelForCausalLM.from_config(model.config.text_config)
    text.model.load_state_dict(model.model.language_model.state_dict())
    text.lm_head.load_state_dict(model.lm_head.state_dict())
    with tempfile.TemporaryDirectory() as directory:
        text.save_pretrained(directory)
        return {f"language_model.{name}": x for name, x in load_file(f"{directory}/model.safetensors").items()}


def _eyes(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Queries, keys and values in one tensor, queries and keys in pairs that rotate."""
    heads = model.config.vision_config.num_attention_heads
    found, parts = dict[str, torch.Tensor](), dict[str, list[torch.Tensor]]()
    for name, x in model.model.state_dict().items():
        if name.startswith("language_model."):
            continue
        part = re.search(r"\.attn\.([qkv])_proj\.", name)
        if part is None:
            found[named(name, _NAMES)] = x.contiguous()
            continue
        if part[1] != "v":
            x = x.view(heads, 2, -1, *x.shape[1:]).transpose(1, 2).reshape(x.shape)
        parts.setdefault(named(name.replace(part[0], ".wqkv."), _NAMES), []).append(x)
    return found | {name: torch.cat(three) for name, three in parts.items()}
