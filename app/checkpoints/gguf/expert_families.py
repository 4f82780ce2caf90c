"""Families with experts as llama.cpp has them: all experts of a layer lie in one tensor, a file may hold gate above up
in one, and layers that only predict further tokens stand behind the last."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from app.checkpoints.gguf.architecture import LAYER, Architecture
from app.checkpoints.gguf.header import GgufHeader
from app.checkpoints.gguf.keys import Keys
from app.errors import UnsupportedError

EXPERTS = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
    "ffn_gate_up_exps": "mlp.experts.gate_up_proj",
}
_LAYER = LAYER | EXPERTS
SHARED = _LAYER | {
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
}
_POST_NORM = {"post_attention_norm": "post_attention_layernorm"}
_GPT_OSS = _LAYER | _POST_NORM | {"attn_sinks.weight": "self_attn.sinks"}
LATENT = SHARED | {
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_k_b": "self_attn.k_b_proj",  # `description.py` joins both to the one above
    "attn_v_b": "self_attn.v_b_proj",
}

_CHOSEN = {"num_experts_per_tok": "expert_used_count"}
QWEN = _CHOSEN | {"num_experts": "expert_count", "moe_intermediate_size": "expert_feed_forward_length"}
_LOCAL = _CHOSEN | {"num_local_experts": "expert_count"}
ROUTED = _CHOSEN | {
    "n_routed_experts": "expert_count",
    "moe_intermediate_size": "expert_feed_forward_length",
}
_ERNIE = {
    "moe_num_experts": "expert_count",
    "moe_k": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
}
MULTIPLIERS = {
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "attention_multiplier": "attention.scale",
    "logits_scaling": "logit_scale",
}
_SOFTMAX, _SIGMOID = 1, 2  # values of `expert_gating_func`
_MAVERICK = 128  # experts: the Llama 4 whose queries and keys are not normed


def _shared_of_granite(keys: Keys, header: GgufHeader) -> Mapping[str, Any]:
    return {"shared_intermediate_size": keys.size("expert_shared_feed_forward_length") or 0}


def _llama4(keys: Keys, header: GgufHeader) -> Mapping[str, Any]:
    step = keys.size("interleave_moe_layer_step") or 1
    return {"interleave_moe_layer_step": step, "use_qk_norm": keys.size("expert_count") != _MAVERICK}


def choosing(keys: Keys) -> dict[str, Any]:
    """Reads how the families of DeepSeek choose experts; what a file leaves out is nothing."""
    groups = keys.size("expert_group_count") or 1
    return {
        "routed_scaling_factor": keys.number("expert_weights_scale") or 1.0,
        "norm_topk_prob": bool(keys.flag("expert_weights_norm")),
        "n_shared_experts": keys.size("expert_shared_count") or 0,
        "first_k_dense_replace": keys.size("leading_dense_block_count") or 0,
        "n_group": groups,
        "topk_group": keys.size("expert_group_used_count") or groups,
    }


def _routed(keys: Keys, header: GgufHeader) -> Mapping[str, Any]:
    return choosing(keys)


def _ernie(keys: Keys, header: GgufHeader) -> Mapping[str, Any]:
    return {
        "moe_layer_interval": keys.size("interleave_moe_layer_step") or 1,
        "moe_layer_start_index": keys.size("leading_dense_block_count") or 0,
        "moe_num_shared_experts": keys.size("expert_shared_count") or 0,
    }


def _glm4(keys: Keys, header: GgufHeader) -> Mapping[str, Any]:
    return {**choosing(keys), "use_qk_norm": "blk.0.attn_q_norm.weight" in header.tensors}


def latent_sizes(keys: Keys) -> dict[str, Any]:
    """Those of latent attention, whose key and value sizes are the latent's in files that split `kv_b_proj`."""
    rope = keys.needed("rope.dimension_count")
    key = keys.size("attention.key_length_mla") or keys.size("attention.key_length")
    value = keys.size("attention.value_length_mla") or keys.size("attention.value_length")
    return {
        "q_lora_rank": keys.size("attention.q_lora_rank"),
        "kv_lora_rank": keys.needed("attention.kv_lora_rank"),
        "qk_nope_head_dim": keys.must("attention.key_length", key) - rope,
        "qk_rope_head_dim": rope,
        "v_head_dim": keys.must("attention.value_length", value),
        "head_dim": rope,
        "num_key_value_heads": keys.size("attention.head_count"),
    }


def _deepseek(keys: Keys, header: GgufHeader) -> Mapping[str, Any]:
    corrects = any(name.endswith(".exp_probs_b.bias") for name in header.tensors)
    rule, gating = choosing(keys), keys.size("expert_gating_func") or (_SIGMOID if corrects else _SOFTMAX)
    if gating not in (_SOFTMAX, _SIGMOID):
        raise UnsupportedError(f"GGUF: expert_gating_func is {gating}; known: 1 (softmax), 2 (sigmoid)", param="model")
    if keys.number("attention.temperature_scale"):
        raise UnsupportedError("GGUF: attention.temperature_scale is not supported in deepseek2", param="model")
    grouped = "group_limited_greedy" if rule["n_group"] > 1 else "greedy"
    return {
        **latent_sizes(keys),
        **rule,
        "scoring_func": "sigmoid" if gating == _SIGMOID else "softmax",
        "topk_method": "noaux_tc" if corrects else grouped,
    }


MIXTRAL = Architecture("mixtral", "MixtralForCausalLM", _LAYER, sizes=_LOCAL, pairs=True)  # "llama" with experts
WIDE_SHARED = {"shared_expert_intermediate_size": "expert_shared_feed_forward_length"}
_EXPERT_WIDTH = {"intermediate_size": "expert_feed_forward_length"}
EXPERT_FAMILIES = {
    "qwen2moe": Architecture(
        "qwen2_moe", "Qwen2MoeForCausalLM", SHARED, {"norm_topk_prob": False}, QWEN | WIDE_SHARED
    ),
    "qwen3moe": Architecture("qwen3_moe", "Qwen3MoeForCausalLM", _LAYER, {"norm_topk_prob": True}, QWEN),
    "olmoe": Architecture(
        "olmoe", "OlmoeForCausalLM", _LAYER, {"norm_topk_prob": False}, _CHOSEN | {"num_experts": "expert_count"}
    ),
    "granitemoe": Architecture(
        *("granitemoeshared", "GraniteMoeSharedForCausalLM", SHARED),
        sizes=_LOCAL, numbers=MULTIPLIERS, derived=_shared_of_granite, pairs=True,
    ),
    "gpt-oss": Architecture(
        "gpt_oss", "GptOssForCausalLM", _GPT_OSS, sizes=_LOCAL | _EXPERT_WIDTH, rope={"truncate": False}
    ),
    "glm4moe": Architecture("glm4_moe", "Glm4MoeForCausalLM", SHARED | _POST_NORM, sizes=ROUTED, derived=_glm4),
    "dots1": Architecture("dots1", "Dots1ForCausalLM", SHARED, sizes=ROUTED, derived=_routed),
    "ernie4_5-moe": Architecture(
        "ernie4_5_moe", "Ernie4_5_MoeForCausalLM", SHARED, sizes=_ERNIE, derived=_ernie
    ),
    "llama4": Architecture(
        *("llama4_text", "Llama4ForCausalLM", SHARED),
        sizes=_LOCAL | _EXPERT_WIDTH | {"intermediate_size_mlp": "feed_forward_length"}, derived=_llama4,
    ),
    "deepseek2": Architecture("deepseek_v3", "DeepseekV3ForCausalLM", LATENT, sizes=ROUTED, derived=_deepseek),
}  # fmt: skip
