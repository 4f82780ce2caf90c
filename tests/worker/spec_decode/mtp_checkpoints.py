"""Tiny checkpoints with a layer behind the last one, and what it drafts, by transformers' own layers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from tests.tiny_models import hf_model, tiny_model
from tests.worker.spec_decode.drafters import Drafts, chained, drawn, hidden_states

EXPERTS: dict[str, Any] = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "initializer_range": 0.1,
}
SHAPES: dict[str, dict[str, Any]] = {
    "deepseek_v3": {
        **EXPERTS, "num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 24, "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8, "v_head_dim": 16, "head_dim": 8,
    },
    "glm4_moe": {
        **EXPERTS, "num_key_value_heads": 2, "head_dim": 16, "use_qk_norm": True, "partial_rotary_factor": 0.5,
    },
}  # fmt: skip


def with_layer_behind(family: str, folder: Path) -> tuple[Path, PreTrainedModel, Drafts]:
    """The directory, the target alone, and the reference."""
    plain = tiny_model(family, **SHAPES[family])
    target = hf_model(plain)
    stored, number, size = load_file(plain / "model.safetensors"), target.config.num_hidden_layers, 64
    last, prefix = f"model.layers.{number - 1}.", f"model.layers.{number}."
    names = [name for name in stored if name.startswith(last)]
    made = {
        prefix + name.removeprefix(last): stored[name] + drawn(i, *stored[name].shape) * 0.3
        for i, name in enumerate(names)
    }
    own = {name: 1 + drawn(200 + i, size) for i, name in enumerate(("enorm", "hnorm", "shared_head.norm"))}
    projection = drawn(210, size, 2 * size)
    made |= {f"{prefix}{name}.weight": tensor for name, tensor in own.items()} | {f"{prefix}eh_proj.weight": projection}
    made[f"{prefix}embed_tokens.weight"] = stored["model.embed_tokens.weight"].clone()
    made[f"{prefix}shared_head.head.weight"] = stored["lm_head.weight"].clone()
    shutil.copytree(plain, folder, dirs_exist_ok=True)
    save_file(stored | made, folder / "model.safetensors")
    config = json.loads((plain / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 1}))
    return folder, target, _reference(target, made, prefix, own, projection)


def _reference(
    target: PreTrainedModel, made: dict[str, torch.Tensor], prefix: str, own: dict[str, torch.Tensor], projection: Any
) -> Drafts:
    model: Any = target.model
    layer = _layer(model, made, prefix)
    embedding, head = model.embed_tokens.weight.detach(), target.get_output_embeddings().weight.detach()
    eps = target.config.rms_norm_eps

    def normed(x: torch.Tensor, name: str) -> torch.Tensor:
        return F.rms_norm(x, x.shape[-1:], own[name], eps)

    def run(following: list[int], features: torch.Tensor) -> torch.Tensor:
        count, embedded = len(following), embedding[following].clone()
        embedded[0] = 0
        x = F.linear(torch.cat((normed(embedded, "enorm"), normed(features, "hnorm")), dim=-1), projection)[None]
        places = torch.arange(count)[None]
        mask = torch.full((count, count), float("-inf")).triu(1)[None, None]
        angles = model.rotary_emb(x, places)
        with torch.no_grad():
            out = layer(x, attention_mask=mask, position_ids=places, position_embeddings=angles)
        return (out[0] if isinstance(out, tuple) else out)[0]

    def drafts(tokens: list[int], count: int) -> list[int]:
        def tell(x: torch.Tensor) -> int:
            return int((head @ normed(x, "shared_head.norm")).argmax())

        return chained(tokens, count, hidden_states(target, tokens)[-1], run, tell)

    return drafts


def _layer(model: Any, made: dict[str, torch.Tensor], prefix: str) -> Any:
    """A layer of transformers' like the last one, with other weights: those of the checkpoint, as it loads them."""
    last = model.layers[-1]
    layer = type(last)(model.config, len(model.layers) - 1).eval()
    found = {name.removeprefix(prefix): tensor for name, tensor in made.items()}
    state = {name: found[name] for name in layer.state_dict() if name in found}
    experts = [name for name in layer.state_dict() if name not in found]
    for name in experts:  # stacked in memory, apart in the file
        parts = ("gate_proj", "up_proj") if name.endswith("gate_up_proj") else ("down_proj",)
        count = model.config.n_routed_experts
        state[name] = torch.stack(
            [torch.cat([found[f"mlp.experts.{e}.{part}.weight"] for part in parts]) for e in range(count)]
        )
    layer.load_state_dict(state)
    return layer
