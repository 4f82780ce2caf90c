"""Tiny configurations of families whose layers keep states: sizes that are no powers of 2."""

from __future__ import annotations

from typing import Any

DELTA = {
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16},
    **{"linear_value_head_dim": 24, "num_hidden_layers": 4},
}
EXPERTS = {
    **{"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48},
    "shared_expert_intermediate_size": 40,
}
MAMBA = {"state_size": 12, "num_hidden_layers": 3}
NO_HEADS = ["num_attention_heads", "num_key_value_heads", "intermediate_size", "max_position_embeddings"]
MAMBA2 = {
    **{"mamba_n_heads": 6, "mamba_d_head": 24, "mamba_n_groups": 2, "mamba_d_state": 16, "mamba_expand": 2},
    **{"hidden_size": 72, "num_hidden_layers": 4, "mamba_chunk_size": 16, "num_attention_heads": 3},
    **{"pad_token_id": 0, "without": ["head_dim"]},
}
GRANITE = {
    **{**MAMBA2, "layer_types": ["mamba", "attention", "mamba", "mamba"], "shared_intermediate_size": 56},
    **{"embedding_multiplier": 3.0, "residual_multiplier": 0.4, "attention_multiplier": 0.1, "logits_scaling": 2.0},
}
FALCON_H1 = {
    **{**MAMBA2, "mamba_d_ssm": 144, "embedding_multiplier": 3.0, "lm_head_multiplier": 0.7, "key_multiplier": 0.5},
    **{"attention_out_multiplier": 0.9, "attention_in_multiplier": 1.1, "mlp_multipliers": [0.8, 0.6]},
    **{"ssm_multipliers": [0.9, 0.8, 1.1, 1.2, 0.7], "ssm_in_multiplier": 1.2, "ssm_out_multiplier": 0.8},
}
NEMOTRON = {
    **{"mamba_num_heads": 6, "mamba_head_dim": 24, "n_groups": 2, "ssm_state_size": 16, "chunk_size": 16},
    **{"conv_kernel": 4, "hybrid_override_pattern": "M-*M-", "without": ["num_hidden_layers"]},
}
NEMOTRON_EXPERTS = {
    **{"hybrid_override_pattern": "ME*ME", "n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 2},
    **{"topk_group": 1, "moe_intermediate_size": 40, "moe_shared_expert_intermediate_size": 56},
    "routed_scaling_factor": 1.5,
}
LFM2 = {"layer_types": ["conv", "full_attention", "conv"], "num_hidden_layers": 3}
JAMBA = {
    **{"num_hidden_layers": 4, "attn_layer_period": 4, "attn_layer_offset": 1, "expert_layer_period": 2},
    **{"expert_layer_offset": 1, "num_experts": 6, "num_experts_per_tok": 2, "mamba_d_state": 12},
    "without": ["head_dim"],
}
MINIMAX = {
    **{"num_hidden_layers": 4, "num_attention_heads": 4, "head_dim": 24, "num_local_experts": 6, "block_size": 16},
    **{"full_attn_alpha_factor": 1.5, "full_attn_beta_factor": 0.7, "linear_attn_alpha_factor": 1.2},
    **{"linear_attn_beta_factor": 0.8, "mlp_alpha_factor": 0.9, "mlp_beta_factor": 1.3},
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
}
KIMI = {
    **{"num_hidden_layers": 5, "num_attention_heads": 4, "num_key_value_heads": 4, "num_local_experts": 8},
    **{"kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 24, "linear_head_dim": 24},
    **{"linear_num_heads": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "moe_intermediate_size": 48},
    "layer_types": ["full_attention", *["linear_attention"] * 2, "full_attention", "linear_attention"],
    **{"pad_token_id": 0, "without": ["head_dim"]},
}
# As wide for keys as for values: transformers (5.17) saves the three convolutions in thirds, however wide they are.
OLMO = {
    **{**DELTA, "linear_num_key_heads": 4, "linear_key_head_dim": 24, "num_key_value_heads": 2},
    **{"pad_token_id": 0, "rope_parameters": None, "without": ["head_dim"]},
}
ZAMBA2 = {
    **{"hidden_size": 72, "num_hidden_layers": 3, "num_attention_heads": 3, "num_key_value_heads": 3, "chunk_size": 16},
    **{"n_mamba_heads": 6, "mamba_ngroups": 2, "mamba_d_state": 16, "adapter_rank": 8, "pad_token_id": 0},
    "tie_word_embeddings": True,  # without which transformers shares no blocks
    "layers_block_type": ["linear_attention", "hybrid", "hybrid"],
    "time_step_min": 1e-9,  # below which transformers clamps prompts' steps alone, not those of decodes
    "without": ["head_dim"],
}
ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
# name: (transformers' model type, changes to the tiny configuration)
STATE_VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_next": ("qwen3_next", {**DELTA, **EXPERTS}),
    "qwen3_next-dense": (
        "qwen3_next",
        {**DELTA, **EXPERTS, "mlp_only_layers": [1], "layer_types": ["full_attention", *["linear_attention"] * 3]},
    ),
    "qwen3_5": ("qwen3_5_text", {**DELTA, "tie_word_embeddings": True}),
    # What tokens share is one of the experts here.
    "qwen3_5_moe": ("qwen3_5_moe_text", {**DELTA, **EXPERTS, "shared_expert_intermediate_size": 48}),
    "mamba": ("mamba", {**MAMBA, "without": [*NO_HEADS, "head_dim"]}),
    "falcon_mamba": ("falcon_mamba", {**MAMBA, "use_conv_bias": False, "without": [*NO_HEADS, "head_dim"]}),
    "mamba2": (
        "mamba2",
        {
            **{"num_heads": 6, "head_dim": 24, "hidden_size": 72, "n_groups": 2, "state_size": 16, "chunk_size": 16},
            "without": NO_HEADS,
        },
    ),
    "bamba": ("bamba", {**MAMBA2, "attn_layer_indices": [1, 3]}),
    "granite_hybrid": ("granitemoehybrid", {**GRANITE, "num_local_experts": 6, "num_experts_per_tok": 2}),
    "granite_hybrid-dense": (
        "granitemoehybrid",
        {**GRANITE, "num_local_experts": 0, "position_embedding_type": "rope"},
    ),
    "nemotron_h": ("nemotron_h", NEMOTRON),
    "nemotron_h-experts": ("nemotron_h", {**NEMOTRON, **NEMOTRON_EXPERTS}),
    "nemotron_h-latent": ("nemotron_h", {**NEMOTRON, **NEMOTRON_EXPERTS, "moe_latent_size": 24}),
    "falcon_h1": ("falcon_h1", FALCON_H1),
    "falcon_h1-norms": ("falcon_h1", {**FALCON_H1, "mamba_rms_norm": True, "mamba_norm_before_gate": False}),
    "lfm2": ("lfm2", {**LFM2, "block_auto_adjust_ff_dim": False}),
    "lfm2-adjusted": ("lfm2", {**LFM2, "block_multiple_of": 32, "conv_bias": True}),
    "lfm2_moe": (
        "lfm2_moe",
        {**LFM2, "num_dense_layers": 1, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48},
    ),
    "jamba": ("jamba", JAMBA),
    "minimax": ("minimax", MINIMAX),
    "kimi_linear": ("kimi_linear", KIMI),
    "olmo_hybrid": ("olmo_hybrid", OLMO),
    "zamba2": ("zamba2", ZAMBA2),
    "zamba2-adapted": (
        "zamba2",
        {
            **{**ZAMBA2, "num_hidden_layers": 2, "layers_block_type": ["hybrid"] * 2, "num_mem_blocks": 2},
            **{"use_shared_attention_adapter": True, "use_mem_rope": True},
        },
    ),
    "olmo_hybrid-rope": ("olmo_hybrid", {**OLMO, **ROPE, "linear_allow_neg_eigval": False}),
}

# Sizes of whole blocks of 32, which quantized forms store.
_WIDE = {"intermediate_size": 96, "initializer_range": 0.1}
_HEADS = {
    **{**MAMBA2, **_WIDE, "hidden_size": 64, "mamba_n_heads": 8, "mamba_d_head": 16, "head_dim": 16, "without": []},
    **{"num_attention_heads": 4, "num_key_value_heads": 2},
}
_MIXER = {**NEMOTRON, **_WIDE, "mamba_num_heads": 8, "mamba_head_dim": 16}
_MIXER_EXPERTS = {
    **{**_MIXER, **NEMOTRON_EXPERTS, "moe_intermediate_size": 64, "moe_shared_expert_intermediate_size": 96},
}
_ALONE = {
    **{**MAMBA, "initializer_range": 0.1, "state_size": 16, "time_step_rank": 32},
    "without": [*NO_HEADS, "head_dim"],
}
_DELTA = {
    **{**DELTA, **_WIDE, "linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_value_head_dim": 16},
}
_DELTA_EXPERTS = {**_DELTA, **EXPERTS, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 32}
_GRANITE = {**GRANITE, **_HEADS, "shared_intermediate_size": 64, "without": ["head_dim"]}
_FALCON = {**FALCON_H1, **_HEADS, "mamba_d_ssm": 128}
_JAMBA = {**JAMBA, **_WIDE, "mamba_dt_rank": 32, "mamba_d_state": 16}
STORABLE: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_next": ("qwen3_next", _DELTA_EXPERTS),
    "qwen3_5": ("qwen3_5_text", _DELTA),
    "qwen3_5_moe": ("qwen3_5_moe_text", _DELTA_EXPERTS),
    "mamba": ("mamba", _ALONE),
    "mamba-tied": ("mamba", {**_ALONE, "tie_word_embeddings": True, "use_conv_bias": False}),
    "falcon_mamba": ("falcon_mamba", _ALONE),
    "mamba2": (
        "mamba2",
        {
            **{"num_heads": 8, "head_dim": 16, "n_groups": 2, "state_size": 16, "chunk_size": 16},
            **{"initializer_range": 0.1, "without": NO_HEADS},
        },
    ),
    "bamba": ("bamba", {**_HEADS, "attn_layer_indices": [1, 3]}),
    "granite_hybrid": ("granitemoehybrid", {**_GRANITE, "num_local_experts": 6, "num_experts_per_tok": 2}),
    "granite_hybrid-dense": (
        "granitemoehybrid",
        {**_GRANITE, "num_local_experts": 0, "shared_intermediate_size": 96, "position_embedding_type": "rope"},
    ),
    "nemotron_h": ("nemotron_h", _MIXER),
    "nemotron_h-experts": ("nemotron_h", _MIXER_EXPERTS),
    "nemotron_h-latent": ("nemotron_h", {**_MIXER_EXPERTS, "moe_latent_size": 32}),
    "falcon_h1": ("falcon_h1", _FALCON),
    "falcon_h1-norms": ("falcon_h1", {**_FALCON, "mamba_rms_norm": True, "mamba_norm_before_gate": False}),
    "lfm2": ("lfm2", {**LFM2, **_WIDE, "block_auto_adjust_ff_dim": False}),
    "lfm2_moe": (
        "lfm2_moe",
        {
            **{**LFM2, **_WIDE, "tie_word_embeddings": True, "num_dense_layers": 1, "num_experts": 8},
            **{"num_experts_per_tok": 2, "moe_intermediate_size": 64},
        },
    ),
    "jamba": ("jamba", _JAMBA),
    "jamba-dense": ("jamba", {**_JAMBA, "num_experts": 1, "num_experts_per_tok": 1}),
    "minimax": ("minimax", {**MINIMAX, **_WIDE, "head_dim": 32}),
    "kimi_linear": (
        "kimi_linear",
        {
            **{**KIMI, **_WIDE, "moe_intermediate_size": 64, "linear_head_dim": 32, "linear_num_heads": 8},
            **{"num_attention_heads": 8, "num_key_value_heads": 8},
            **{"qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "v_head_dim": 16},
        },
    ),
    "olmo_hybrid": (
        "olmo_hybrid",
        {
            **{**OLMO, **_WIDE, "linear_key_head_dim": 32, "linear_value_head_dim": 32},
            **{"linear_num_key_heads": 8, "linear_num_value_heads": 8},
        },
    ),
    "zamba2": (
        "zamba2",
        {
            **{**ZAMBA2, **_WIDE, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4},
            "n_mamba_heads": 8,
        },
    ),
}
