"""Tiny checkpoints with a layer behind the last one, and what it drafts, by transformers' own layers.

The layer is that of another random model of the same shape; names are those of published checkpoints.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from tests.tiny_models import hf_model, tiny_model
from tests.worker.spec_decode.drafters import Drafts, chained, drawn, hidden_states

_PLAIN: dict[str, Any] = {"num_hidden_layers": 2, "num_attention_heads": 4, "initializer_range": 0.1}
EXPERTS: dict[str, Any] = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    **_PLAIN,
}
_FEW: dict[str, Any] = {**_PLAIN, "num_key_value_heads": 2, "head_dim": 16}
_DELTA: dict[str, Any] = {
    **_FEW, "num_hidden_layers": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
}  # fmt: skip
_QWEN_EXPERTS: dict[str, Any] = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 40,
}  # fmt: skip


@dataclass(frozen=True)
class Published:
    """How a family's checkpoints have it: the names of its parts, with `{n}` for the model's layers."""

    family: str  # transformers' name
    shape: dict[str, Any]
    layer: str = "model.layers.{n}."
    join: str = "model.layers.{n}.eh_proj"
    token: str = "model.layers.{n}.enorm"
    hidden: str = "model.layers.{n}.hnorm"
    norm: str | None = "model.layers.{n}.shared_head.norm"
    norm_is_of_head: bool = True
    hidden_first: bool = False
    masks_first: bool = True
    norm_is_offset: bool = False
    turns_once: bool = True  # else by three positions of each token, alike in texts
    like: int = -1  # the layer that it is like
    config: dict[str, Any] = field(default_factory=lambda: {"num_nextn_predict_layers": 1})
    parts: tuple[tuple[str, str], ...] = ()  # what is taken of that layer, and its name; none: all by the same names

    def own_name(self, name: str) -> str | None:
        """The name in the layer of a tensor of the one that it is like; None: it has no such one."""
        for theirs, own in self.parts:
            if name.startswith(theirs):
                return own + name.removeprefix(theirs)
        return None if self.parts else name


class Half:
    """The first attention and the first feed-forward layer of LongCat-Flash's layer, without experts."""

    def __init__(self, layer: Any) -> None:
        self.self_attn, self._mlp = layer.self_attn[0], layer.mlps[0]
        self._before, self._behind = layer.input_layernorm[0], layer.post_attention_layernorm[0]

    def __call__(self, x: torch.Tensor, **how: Any) -> torch.Tensor:
        x = x + self.self_attn(hidden_states=self._before(x), **how)[0]
        found: torch.Tensor = x + self._mlp(self._behind(x))
        return found


_APART: dict[str, Any] = {
    "layer": "mtp.layers.0.", "join": "mtp.fc", "token": "mtp.pre_fc_norm_embedding",
    "hidden": "mtp.pre_fc_norm_hidden", "norm": "mtp.norm", "norm_is_of_head": False, "masks_first": False,
}  # fmt: skip
_QWEN: dict[str, Any] = {**_APART, "norm_is_offset": True}
_LATER: dict[str, Any] = {**_QWEN, "turns_once": False, "config": {"mtp_num_hidden_layers": 1}}
SHAPES: dict[str, Published] = {
    "deepseek_v3": Published("deepseek_v3", {
        **EXPERTS, "num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 24, "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8, "v_head_dim": 16, "head_dim": 8,
    }),
    "glm4_moe": Published("glm4_moe", {**EXPERTS, **_FEW, "use_qk_norm": True, "partial_rotary_factor": 0.5}),
    "hy_v3": Published("hy_v3", {
        **_FEW, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "num_shared_experts": 1,
    }, norm="model.layers.{n}.final_layernorm", norm_is_of_head=False),
    "qwen3_next": Published("qwen3_next", {**_DELTA, **_QWEN_EXPERTS}, **_QWEN, config={}),
    "qwen3_5": Published("qwen3_5_text", {**_DELTA, "tie_word_embeddings": True}, **_LATER),
    "qwen3_5_moe": Published("qwen3_5_moe_text", {**_DELTA, **_QWEN_EXPERTS}, **_LATER),
    "exaone_moe": Published("exaone_moe", {
        **_FEW, "num_hidden_layers": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
        "num_shared_experts": 1, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "sliding_window": 8,
    }, like=0, **_APART),
    "mimo": Published(
        "qwen2", _FEW, layer="model.mtp_layers.0.", join="model.mtp_layers.0.input_proj",
        token="model.mtp_layers.0.token_layernorm", hidden="model.mtp_layers.0.hidden_layernorm",
        norm="model.mtp_layers.0.final_layernorm", norm_is_of_head=False, hidden_first=True,
        config={"architectures": ["MiMoForCausalLM"], "model_type": "mimo", "num_nextn_predict_layers": 1},
    ),
    "ernie4_5_moe": Published("ernie4_5_moe", {
        **_FEW, "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32, "moe_num_shared_experts": 1,
        "moe_layer_start_index": 1,
    }, layer="model.mtp_block.0.", join="model.mtp_linear_proj.0", token="model.mtp_emb_norm.0",
        hidden="model.mtp_hidden_norm.0", norm=None, like=0),
    "longcat_flash": Published("longcat_flash", {
        **_PLAIN, "without": ["num_hidden_layers"], "num_layers": 2, "kv_lora_rank": 16, "q_lora_rank": 24,
        "head_dim": 8, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "num_key_value_heads": 4,
        "ffn_hidden_size": 48, "expert_ffn_hidden_size": 32, "n_routed_experts": 4, "moe_topk": 2,
        "zero_expert_num": 2,
    }, layer="model.mtp.layers.0.", join="model.mtp.layers.0.eh_proj", token="model.mtp.layers.0.enorm.m",
        hidden="model.mtp.layers.0.hnorm.m", norm="model.mtp.norm", norm_is_of_head=False, masks_first=False, like=0,
        config={}, parts=(
            ("self_attn.0.", "self_attn."), ("mlps.0.", "transformer_layer.mlp."),
            ("input_layernorm.0.", "input_layernorm."), ("post_attention_layernorm.0.", "post_attention_layernorm."),
        )),
}  # fmt: skip


def with_layer_behind(family: str, folder: Path) -> tuple[Path, PreTrainedModel, Drafts]:
    """The directory, the target alone, and the reference."""
    if family == "nemotron_h":
        return with_two_blocks_behind(folder)
    one = SHAPES[family]
    plain, other = (tiny_model(one.family, seed=seed, **one.shape) for seed in (0, 9))
    target = hf_model(plain)
    stored, number, size = load_file(plain / "model.safetensors"), target.config.num_hidden_layers, 64
    like = f"model.layers.{one.like % number}."
    made = {
        one.layer.format(n=number) + own: tensor
        for name, tensor in load_file(other / "model.safetensors").items()
        if name.startswith(like) and (own := one.own_name(name.removeprefix(like))) is not None
    }
    names = {"token": one.token, "hidden": one.hidden} | ({} if one.norm is None else {"norm": one.norm})
    base = 0.0 if one.norm_is_offset else 1.0
    tensors = {part: base + drawn(200 + i, size) for i, part in enumerate(names)}
    tensors["join"] = drawn(210, size, 2 * size)
    made |= {f"{name.format(n=number)}.weight": tensors[part] for part, name in (names | {"join": one.join}).items()}
    if one.layer == "model.layers.{n}.":  # copies
        made[f"model.layers.{number}.embed_tokens.weight"] = stored["model.embed_tokens.weight"].clone()
        made[f"model.layers.{number}.shared_head.head.weight"] = stored["model.embed_tokens.weight"].clone()
    shutil.copytree(plain, folder, dirs_exist_ok=True)
    save_file(stored | made, folder / "model.safetensors")
    config = json.loads((plain / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **one.config}))
    model: Any = hf_model(other).model
    layer = model.layers[one.like]
    return folder, target, _reference(target, one, tensors, Half(layer) if one.parts else layer)


def _reference(target: PreTrainedModel, one: Published, own: dict[str, torch.Tensor], layer: Any) -> Drafts:
    model: Any = target.model
    embedding, head = model.embed_tokens.weight.detach(), target.get_output_embeddings().weight.detach()
    eps = target.config.rms_norm_eps

    def normed(x: torch.Tensor, part: str) -> torch.Tensor:
        return F.rms_norm(x, x.shape[-1:], own[part] + one.norm_is_offset, eps)

    def run(following: list[int], features: torch.Tensor) -> torch.Tensor:
        count, embedded = len(following), embedding[following].clone()
        if one.masks_first:
            embedded[0] = 0
        parts = [normed(embedded, "token"), normed(features, "hidden")]
        x = F.linear(torch.cat(parts[::-1] if one.hidden_first else parts, dim=-1), own["join"])[None]
        places = torch.arange(count)
        window = getattr(layer.self_attn, "sliding_window", None) or count
        back = places[:, None] - places
        mask = torch.zeros(count, count).masked_fill((back < 0) | (back >= window), float("-inf"))
        turned = places[None] if one.turns_once else places.expand(3, 1, count)
        angles = model.rotary_emb(x, turned)
        with torch.no_grad():
            out = layer(x, attention_mask=mask[None, None], position_ids=places[None], position_embeddings=angles)
        made = (out[0] if isinstance(out, tuple) else out)[0]
        return made if one.norm is None or one.norm_is_of_head else normed(made, "norm")

    def drafts(tokens: list[int], count: int) -> list[int]:
        def tell(x: torch.Tensor) -> int:
            return int((head @ (normed(x, "norm") if one.norm is not None and one.norm_is_of_head else x)).argmax())

        return chained(tokens, count, hidden_states(target, tokens)[-1], run, tell)

    return drafts


NEMOTRON: dict[str, Any] = {
    "mamba_num_heads": 6, "mamba_head_dim": 24, "n_groups": 2, "ssm_state_size": 16, "chunk_size": 16,
    "hybrid_override_pattern": "ME*E", "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
    "moe_intermediate_size": 40, "moe_shared_expert_intermediate_size": 56, "moe_latent_size": 24,
    "initializer_range": 0.1, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "without": ["num_hidden_layers"],
}  # fmt: skip
_ATTENDS, _EXPERTS = 2, 3  # layers of another model that stand behind


def with_two_blocks_behind(folder: Path) -> tuple[Path, PreTrainedModel, Drafts]:
    """The same of Nemotron-H, whose layer is two of one block, as `mtp.layers` publishes them."""
    plain, other = (tiny_model("nemotron_h", seed=seed, **NEMOTRON) for seed in (0, 9))
    target, size = hf_model(plain), 64
    own = {"enorm": 1 + drawn(200, size), "hnorm": 1 + drawn(201, size), "eh_proj": drawn(210, size, 2 * size)}
    own["final_layernorm"] = 1 + drawn(202, size)
    made = {f"mtp.layers.{int(part[0] == 'f')}.{part}.weight": tensor for part, tensor in own.items()}
    for name, tensor in load_file(other / "model.safetensors").items():
        for number, like in enumerate((_ATTENDS, _EXPERTS)):
            head, found, part = name.partition(f".layers.{like}.")
            if found:
                made[f"mtp.layers.{number}.{part}"] = tensor
    shutil.copytree(plain, folder, dirs_exist_ok=True)
    save_file(load_file(plain / "model.safetensors") | made, folder / "model.safetensors")
    config = json.loads((plain / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
    (folder / "config.json").write_text(json.dumps(config))
    model, layers = cast("Any", target).model, cast("Any", hf_model(other)).model.layers
    embedding, head = model.embeddings.weight.detach(), target.get_output_embeddings().weight.detach()

    def normed(x: torch.Tensor, part: str) -> torch.Tensor:
        return F.rms_norm(x, x.shape[-1:], own[part], target.config.layer_norm_epsilon)

    def run(following: list[int], features: torch.Tensor) -> torch.Tensor:
        parts = [normed(embedding[following], "enorm"), normed(features, "hnorm")]
        x, count = F.linear(torch.cat(parts, dim=-1), own["eh_proj"])[None], len(following)
        mask = torch.full((count, count), float("-inf")).triu(1)[None, None]
        with torch.no_grad():
            x = layers[_EXPERTS](layers[_ATTENDS](x, attention_mask=mask))
        return normed(x[0], "final_layernorm")

    def drafts(tokens: list[int], count: int) -> list[int]:
        with torch.no_grad():
            features = model(torch.tensor([tokens[:-1]])).last_hidden_state[0]
        return chained(tokens, count, features, run, lambda x: int((head @ x).argmax()))

    return folder, target, drafts
