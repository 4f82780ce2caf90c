"""What llama.cpp's converter makes of models with Mamba (conversion/mamba.py, nemotron.py, granite.py, falcon_h1.py,
jamba.py), as the numbers that it writes and the way back from them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

Restore = Callable[[torch.Tensor], object]  # takes in what the file's numbers stand for
_OF_CHANNELS = ("mamba", "falcon_mamba", "jamba")  # Mamba 1
MAMBA_TYPES = (*_OF_CHANNELS, "mamba2", "nemotron_h", "granitemoehybrid", "bamba", "falcon_h1")
_PART = re.compile(r"(?:backbone|model)\.layers\.(\d+)\.(?:mixer|mamba)\.(.+)")
_NAMES = {
    **{"in_proj.weight": "ssm_in.weight", "out_proj.weight": "ssm_out.weight", "x_proj.weight": "ssm_x.weight"},
    **{"conv1d.weight": "ssm_conv1d.weight", "conv1d.bias": "ssm_conv1d.bias", "A_log": "ssm_a", "D": "ssm_d"},
    **{"dt_bias": "ssm_dt.bias", "dt_proj.weight": "ssm_dt.weight", "dt_proj.bias": "ssm_dt.bias"},
    **{"dt_layernorm.weight": "ssm_dt_norm.weight", "b_layernorm.weight": "ssm_b_norm.weight"},
    **{"c_layernorm.weight": "ssm_c_norm.weight", "norm.weight": "ssm_norm.weight"},
    **{"in_proj.bias": "ssm_in.bias", "out_proj.bias": "ssm_out.bias"},
}
# Falcon-H1's: the rest of what is multiplied, and a norm that loses its leaf.
_SCALED = {
    **{"q_proj": "attn_q.weight", "k_proj": "attn_k.weight", "v_proj": "attn_v.weight", "o_proj": "attn_output.weight"},
    **{"gate_proj": "ffn_gate.weight", "down_proj": "ffn_down.weight", "pre_ff_layernorm": "ffn_norm"},
    **{"embed_tokens": "token_embd.weight", "lm_head": "output.weight"},
}


def mamba_tensors(
    name: str, parameter: torch.Tensor, config: Mapping[str, Any]
) -> Iterator[tuple[str, torch.Tensor, Restore]]:
    """Name, numbers and way back of a parameter that the converter changes; none of any other."""
    found, module, kind = _PART.fullmatch(name), name.split(".")[-2], config["model_type"]
    if found is not None and found[2] in _NAMES:
        own = f"blk.{found[1]}.{_NAMES[found[2]]}"
    elif kind == "falcon_h1" and module in _SCALED:
        layer = re.search(r"layers\.\d+\.", name)
        own = (layer[0].replace("layers", "blk") if layer else "") + _SCALED[module]
    else:
        return
    if own.endswith("ssm_a"):
        shape = parameter.shape if kind in _OF_CHANNELS else (-1, 1)
        yield own, -parameter.exp().view(shape), lambda x: parameter.copy_((-x).log().view(parameter.shape))
        return
    shape = parameter.squeeze().shape
    if own.endswith("ssm_norm.weight"):
        shape = (config.get("n_groups") or config["mamba_n_groups"], -1)
    elif own.endswith("ssm_d") and kind not in _OF_CHANNELS:
        shape = (-1, 1)
    scale = _multiplier(module, config) if kind == "falcon_h1" and own.endswith(".weight") else torch.ones(())
    yield own, (parameter * scale).view(shape), lambda x: parameter.copy_(x.view(parameter.shape) / scale)


def _multiplier(module: str, config: Mapping[str, Any]) -> torch.Tensor:
    """What a weight of Falcon-H1 is multiplied by; of rows where they differ."""
    inward, (gate, down) = config["attention_in_multiplier"], config["mlp_multipliers"]
    inner, groups = config["mamba_d_ssm"], config["mamba_n_groups"] * config["mamba_d_state"]
    rows = torch.tensor([inner, inner, groups, groups, config["mamba_n_heads"]])
    scales: dict[str, Any] = {
        **{"q_proj": inward, "k_proj": inward * config["key_multiplier"], "v_proj": inward},
        **{"o_proj": config["attention_out_multiplier"], "out_proj": config["ssm_out_multiplier"]},
        **{"gate_proj": gate, "down_proj": down, "lm_head": config["lm_head_multiplier"]},
        "embed_tokens": config["embedding_multiplier"],
    }
    if module == "in_proj":
        parts = torch.tensor(config["ssm_multipliers"]).repeat_interleave(rows)
        return parts[:, None] * config["ssm_in_multiplier"]
    return torch.tensor(scales.get(module, 1.0))


def mamba_sizes(config: Mapping[str, Any]) -> dict[str, Any]:
    """The keys that the converter adds; None: one that it does not write."""
    kind = config["model_type"]
    found = _of_channels(config) if kind in _OF_CHANNELS else _of_heads(config)
    more = {"nemotron_h": _nemotron, "granitemoehybrid": _granite, "bamba": _granite, "jamba": _jamba}
    found |= more.get(kind, lambda config: {})(config)
    if kind in ("mamba", "falcon_mamba", "mamba2"):
        found |= {"feed_forward_length": 0, "attention.head_count": 0, "attention.head_count_kv": None}
        found |= {"context_length": 1 << 20, "rope.freq_base": None, "attention.key_length": None}
        found |= {"attention.value_length": None}
    if kind == "falcon_mamba":
        found["ssm.dt_b_c_rms"] = True
    if "layer_norm_epsilon" in config:
        found["attention.layer_norm_rms_epsilon"] = config["layer_norm_epsilon"]
    return {f"{{arch}}.{key}": value for key, value in found.items()}


def _of_channels(config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "ssm.conv_kernel": config.get("conv_kernel") or config["mamba_d_conv"],
        "ssm.inner_size": (config.get("expand") or config["mamba_expand"]) * config["hidden_size"],
        "ssm.state_size": config.get("state_size") or config["mamba_d_state"],
        "ssm.time_step_rank": config.get("time_step_rank") or config["mamba_dt_rank"],
    }


def _of_heads(config: Mapping[str, Any]) -> dict[str, Any]:
    def first(*names: str) -> Any:
        return next(config[name] for name in names if config.get(name) is not None)

    heads = first("mamba_num_heads", "mamba_n_heads", "num_heads")
    return {
        "ssm.conv_kernel": first("conv_kernel", "mamba_d_conv"),
        "ssm.state_size": first("ssm_state_size", "state_size", "mamba_d_state"),
        "ssm.group_count": first("n_groups", "mamba_n_groups"),
        "ssm.time_step_rank": heads,
        "ssm.inner_size": heads * first("mamba_head_dim", "mamba_d_head", "head_dim"),
    }


def _attending(config: Mapping[str, Any]) -> list[int]:
    heads = config["num_key_value_heads"]
    if "attn_layer_indices" in config:
        return [heads if layer in config["attn_layer_indices"] else 0 for layer in range(config["num_hidden_layers"])]
    kinds = config.get("layers_block_type") or config["layer_types"]
    return [heads if kind in ("attention", "full_attention") else 0 for kind in kinds]


def _nemotron(config: Mapping[str, Any]) -> dict[str, Any]:
    """Counts layer by layer."""
    kinds = config.get("layers_block_type") or config["layer_types"]
    width = config["moe_intermediate_size"] if "moe" in kinds else config["intermediate_size"]
    found = {
        "attention.head_count_kv": _attending(config),
        "feed_forward_length": [width if kind in ("mlp", "moe") else 0 for kind in kinds],
    }
    if "moe" not in kinds:
        return {**found, **dict.fromkeys(("expert_count", "expert_used_count"))}
    return {
        **found,
        "expert_count": config["n_routed_experts"],
        "expert_used_count": config["num_experts_per_tok"],
        "expert_feed_forward_length": config["moe_intermediate_size"],
        "expert_shared_feed_forward_length": config["moe_shared_expert_intermediate_size"],
        "expert_shared_count": config["n_shared_experts"],
        "expert_weights_norm": config["norm_topk_prob"],
        "expert_weights_scale": config["routed_scaling_factor"],
        "expert_group_count": config["n_group"],
        "expert_group_used_count": config["topk_group"],
        "moe_latent_size": config.get("moe_latent_size"),
    }


def _granite(config: Mapping[str, Any]) -> dict[str, Any]:
    is_bamba = config["model_type"] == "bamba"
    scales = {
        "embedding_scale": "embedding_multiplier",
        "residual_scale": "residual_multiplier",
        "attention.scale": "attention_multiplier",
        "logit_scale": "logits_scaling",
        "expert_shared_feed_forward_length": "shared_intermediate_size",
        "expert_count": "num_local_experts",
        "expert_used_count": "num_experts_per_tok",
    }
    head_dim = config["hidden_size"] // config["num_attention_heads"]
    return {
        **{key: config[name] for key, name in scales.items() if config.get(name) is not None},
        "attention.head_count_kv": _attending(config),
        "rope.dimension_count": head_dim // 2 if is_bamba else head_dim,
        "rope.scaling.finetuned": is_bamba or config.get("position_embedding_type") == "rope",
    }


def _jamba(config: Mapping[str, Any]) -> dict[str, Any]:
    period, offset = config["attn_layer_period"], config["attn_layer_offset"]
    layers, heads = range(config["num_hidden_layers"]), config["num_key_value_heads"]
    return {"attention.head_count_kv": [heads if layer % period == offset else 0 for layer in layers]}
