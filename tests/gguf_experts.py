"""What llama.cpp's converter makes of models with experts: all of a layer in one tensor, and metadata of their own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from transformers import PreTrainedModel

_TRANSPOSED = ("gpt_oss", "llama4_text")
_RENAMED = {
    "block_sparse_moe.router.weight": "ffn_gate_inp.weight",
    "shared_mlp.output_linear.weight": "ffn_down_shexp.weight",
    "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
    "mixer.gate.e_score_correction_bias": "exp_probs_b.bias",
    "mlp.gate.moe_statics.e_score_correction_bias": "exp_probs_b.bias",
    "self_attn.sinks": "attn_sinks.weight",
    "feed_forward.expert_bias": "exp_probs_b.bias",
}
_SOFTMAX, _SIGMOID = 1, 2


def stored_tensors(model: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters, and the buffers that are stored."""
    yield from ((name, parameter.data) for name, parameter in model.named_parameters())
    yield from (
        (name, one)
        for name, one in model.named_buffers()
        if name.endswith(("e_score_correction_bias", "feed_forward.expert_bias"))
    )


def is_plain(own: str, values: torch.Tensor) -> bool:
    """What the converter never quantizes."""
    return values.ndim == 1 or own.endswith(".bias") or "ffn_gate_inp" in own


def parts_of(name: str, parameter: torch.Tensor, config: Mapping[str, Any]) -> list[tuple[str, torch.Tensor]]:
    """Names and views of what a parameter becomes, where `gguf`'s own table does not say; empty: it does."""
    rest = name.partition(".layers.")[2]
    layer, _, rest = rest.partition(".")
    found: dict[str, torch.Tensor] = {}
    if rest == "shared_mlp.output_linear.weight" and config.get("num_local_experts") == 0:
        found = {"ffn_down.weight": parameter}
    elif rest in _RENAMED:
        found = {_RENAMED[rest]: parameter.squeeze(0)}
    elif rest.endswith("shared_expert_gate.weight"):
        found = {"ffn_gate_inp_shexp.weight": parameter[0]}
    elif rest.endswith("kv_b_proj.weight"):
        found = _keys_and_values(parameter, config)
    elif rest.endswith("shared_mlp.input_linear.weight"):
        (gate, up), end = parameter.chunk(2), "" if config.get("num_local_experts") == 0 else "_shexp"
        found = {f"ffn_gate{end}.weight": gate, f"ffn_up{end}.weight": up}
    elif ".experts." in rest:
        found = _experts(rest.rpartition(".experts.")[2], parameter, config)
    if config.get("one_by_one"):
        found = {one: part for own, values in found.items() for one, part in _one_by_one(own, values).items()}
    return [(f"blk.{layer}.{own}", values) for own, values in found.items()]


def _one_by_one(own: str, values: torch.Tensor) -> dict[str, torch.Tensor]:
    """Experts as files of 2023 have them."""
    name = own.removesuffix("_exps.weight")
    return {own: values} if name == own else {f"{name}.{n}.weight": one for n, one in enumerate(values)}


def _keys_and_values(kv: torch.Tensor, config: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    if config.get("not_split"):
        return {"attn_kv_b.weight": kv}
    nope = config["qk_nope_head_dim"]
    heads = kv.view(config["num_attention_heads"], nope + config["v_head_dim"], -1)
    return {"attn_k_b.weight": heads[:, :nope].transpose(1, 2), "attn_v_b.weight": heads[:, nope:]}


def _experts(rest: str, values: torch.Tensor, config: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    leaf = "bias" if rest.endswith("_bias") else "weight"
    if leaf == "weight" and config["model_type"] in _TRANSPOSED:
        values = values.transpose(1, 2)
    if rest.startswith("down_proj"):
        return {f"ffn_down_exps.{leaf}": values}
    if rest.startswith("up_proj"):  # without gates
        return {f"ffn_up_exps.{leaf}": values}
    if config["model_type"] == "gpt_oss":
        gate, up = values[:, 0::2], values[:, 1::2]
    elif config.get("fused"):
        return {f"ffn_gate_up_exps.{leaf}": values}
    else:
        gate, up = values.chunk(2, dim=1)
    return {f"ffn_gate_exps.{leaf}": gate, f"ffn_up_exps.{leaf}": up}


def expert_sizes(config: Mapping[str, Any], architecture: str) -> dict[str, Any]:
    """The keys that the converter adds for experts and latents."""
    if architecture == "granite":
        return {f"{{arch}}.{key}": value for key, value in _granite(config).items()}
    names = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    count = next((config[name] for name in names if config.get(name)), None)
    if count is None:
        return {}
    names = ("moe_k", "num_experts_per_tok", "num_experts_per_token")
    chosen = next(config[name] for name in names if config.get(name))
    found: dict[str, Any] = {"expert_count": count, "expert_used_count": chosen}
    if config["model_type"] in ("gpt_oss", "llama4_text"):
        found["expert_feed_forward_length"] = config["intermediate_size"]
    given = {
        "expert_feed_forward_length": "moe_intermediate_size",
        "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
        "expert_group_count": "n_group",
        "expert_group_used_count": "topk_group",
    }
    found |= {key: config[name] for key, name in given.items() if config.get(name)}
    more = {"granitemoe": _granite, "gpt-oss": _gpt_oss, "llama4": _llama4, "glm4moe": _routed, "deepseek2": _latent}
    more |= {"dots1": _routed, "ernie4_5-moe": _ernie}
    found |= more.get(architecture, lambda config: {})(config)
    return {f"{{arch}}.{key}": value for key, value in found.items()}


def _granite(config: Mapping[str, Any]) -> dict[str, Any]:
    scales = {
        "embedding_scale": "embedding_multiplier",
        "residual_scale": "residual_multiplier",
        "attention.scale": "attention_multiplier",
        "logit_scale": "logits_scaling",
        "expert_shared_feed_forward_length": "shared_intermediate_size",
    }
    return {key: config[name] for key, name in scales.items() if name in config}


def _gpt_oss(config: Mapping[str, Any]) -> dict[str, Any]:
    return {"attention.sliding_window": config["sliding_window"]}


def _llama4(config: Mapping[str, Any]) -> dict[str, Any]:
    step = config["interleave_moe_layer_step"]
    return {"interleave_moe_layer_step": step, "feed_forward_length": config["intermediate_size_mlp"]}


def _routed(config: Mapping[str, Any]) -> dict[str, Any]:
    gating = {"deepseek_v2": _SOFTMAX, "glm4_moe_lite": None}.get(config["model_type"], _SIGMOID)
    return {
        "expert_shared_count": config["n_shared_experts"],
        "leading_dense_block_count": config.get("first_k_dense_replace", 1),
        "expert_weights_scale": config["routed_scaling_factor"],
        "expert_weights_norm": config["norm_topk_prob"],
        "expert_gating_func": gating,
    }


def _ernie(config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "interleave_moe_layer_step": config["moe_layer_interval"],
        "leading_dense_block_count": config["moe_layer_start_index"],
        "expert_shared_count": config["moe_num_shared_experts"],
    }


def _latent(config: Mapping[str, Any]) -> dict[str, Any]:
    rank, rope = config["kv_lora_rank"], config["qk_rope_head_dim"]
    whole, value = config["qk_nope_head_dim"] + rope, config["v_head_dim"]
    found = _routed(config) | {"attention.kv_lora_rank": rank, "rope.dimension_count": rope}
    if config.get("q_lora_rank"):
        found["attention.q_lora_rank"] = config["q_lora_rank"]
    if weight := config["rope_parameters"].get("mscale_all_dim"):
        found["rope.scaling.yarn_log_multiplier"] = 0.1 * weight
    if config.get("not_split"):
        return found | {"attention.key_length": whole, "attention.value_length": value}
    latents = {"attention.head_count_kv": 1, "attention.key_length": rank + rope, "attention.value_length": rank}
    return found | latents | {"attention.key_length_mla": whole, "attention.value_length_mla": value}
