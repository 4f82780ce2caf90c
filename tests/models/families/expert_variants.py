"""Tiny configurations of families with experts: numbers of experts that are odd, or no power of two."""

from __future__ import annotations

from typing import Any

PAD = {"pad_token_id": 0}
FEW = {"num_local_experts": 5, "num_experts_per_tok": 2}
QWEN = {"num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 48}
OLMOE = {"num_experts": 6, "num_experts_per_tok": 3, "num_key_value_heads": 2, "without": ["head_dim"]}
GLM = {
    **{"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 48, "n_shared_experts": 2},
    **{"routed_scaling_factor": 1.7, "num_hidden_layers": 3, "pad_token_id": 0},
}
MULTIPLIERS = {
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.4,
    "attention_multiplier": 0.1,
    "logits_scaling": 2.0,
}
LLAMA4 = {
    **{"num_local_experts": 4, "num_experts_per_tok": 1, "intermediate_size_mlp": 96, "num_hidden_layers": 4},
    **{"pad_token_id": 0, "floor_scale": 16, "attn_scale": 0.3},
}
# A table of which the first positions leave the original context already.
OSS_YARN = {
    **{"rope_type": "yarn", "rope_theta": 1000.0, "factor": 16.0, "beta_fast": 32.0, "beta_slow": 1.0},
    **{"truncate": False, "original_max_position_embeddings": 32},
}
OSS = {"num_local_experts": 6, "num_experts_per_tok": 4, "sliding_window": 9, "rope_parameters": OSS_YARN}
LATENT = {
    **{"num_attention_heads": 4, "num_key_value_heads": 4, "without": ["head_dim"], "q_lora_rank": 24},
    **{"kv_lora_rank": 64, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12},
}  # whose keys and values are expanded from 18 tokens on
LATENT_YARN = {
    **{"rope_type": "yarn", "rope_theta": 1000.0, "factor": 16.0, "original_max_position_embeddings": 32},
    **{"mscale": 0.707, "mscale_all_dim": 0.707},
}
DEEPSEEK = {
    **{**LATENT, "num_hidden_layers": 3, "first_k_dense_replace": 1, "moe_intermediate_size": 48},
    **{"n_routed_experts": 8, "num_experts_per_tok": 3, "routed_scaling_factor": 1.7},
}
GROUPS = {"n_group": 4, "topk_group": 2}
EXAONE = {
    **{"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 48, "num_hidden_layers": 4},
    **{"n_group": 1, "topk_group": 1, "sliding_window_pattern": 2},
}
ERNIE = {
    **{"moe_num_experts": 7, "moe_k": 3, "moe_intermediate_size": 48, "num_hidden_layers": 3, "pad_token_id": 0},
    **{"without": ["head_dim"], "tie_word_embeddings": True},
}
LONGCAT = {
    **{**LATENT, "num_layers": 2, "moe_topk": 4, "n_routed_experts": 7, "expert_ffn_hidden_size": 48},
    **{"ffn_hidden_size": 112, "without": ["num_hidden_layers", "intermediate_size"], "head_dim": 8},
    "routed_scaling_factor": 1.7,
}
DBRX = {
    **{"d_model": 64, "n_heads": 4, "n_layers": 2, "max_seq_len": 512},
    "without": [
        *("hidden_size", "num_attention_heads", "num_hidden_layers", "max_position_embeddings"),
        *("num_key_value_heads", "head_dim", "intermediate_size"),
    ],
    "attn_config": {"kv_n_heads": 2, "clip_qkv": 0.8, "rope_theta": 1000.0},
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
    "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 5, "moe_top_k": 2},
}
HUNYUAN = {"num_experts": 6, "moe_topk": [3, 3], "num_attention_heads": 4, "num_key_value_heads": 2}
ALPHA = {"rope_type": "dynamic", "rope_theta": 1000.0, "alpha": 50.0, "factor": 1.0}
# name: (transformers' model type, changes to the tiny configuration)
EXPERT_VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("mixtral", {**FEW, "sliding_window": 9}),
    "qwen2_moe": ("qwen2_moe", {**QWEN, "shared_expert_intermediate_size": 80}),
    "qwen2_moe-sparse": (
        "qwen2_moe",
        {
            **{**QWEN, "shared_expert_intermediate_size": 80, "norm_topk_prob": True, "decoder_sparse_step": 2},
            **{"num_hidden_layers": 4, "mlp_only_layers": [3], "use_sliding_window": True, "sliding_window": 9},
            **{"max_window_layers": 3, "qkv_bias": False},
        },
    ),
    "qwen3_moe": ("qwen3_moe", {**QWEN, "norm_topk_prob": True}),
    "qwen3_moe-windows": (
        "qwen3_moe",
        {**QWEN, "use_sliding_window": True, "sliding_window": 9, "attention_bias": True},
    ),
    "olmoe": ("olmoe", {**OLMOE, "clip_qkv": 0.8}),
    "olmoe-unclipped": ("olmoe", OLMOE),
    "phimoe": ("phimoe", {**FEW, "attention_bias": True, "lm_head_bias": True, "sliding_window": 9}),
    "granitemoe": ("granitemoe", {**FEW, **MULTIPLIERS}),
    "granitemoeshared": ("granitemoeshared", {**FEW, **MULTIPLIERS, "shared_intermediate_size": 72}),
    "glm4_moe": ("glm4_moe", {**GLM, "use_qk_norm": True, "attention_bias": True}),
    "glm4_moe-groups": ("glm4_moe", {**GLM, "n_group": 4, "topk_group": 2, "norm_topk_prob": False}),
    "llama4": ("llama4_text", LLAMA4),
    "llama4-sparse": ("llama4_text", {**LLAMA4, "interleave_moe_layer_step": 2, "num_experts_per_tok": 2}),
    "gpt_oss": ("gpt_oss", OSS),
    "deepseek_v2": (
        "deepseek_v2",
        {**DEEPSEEK, "q_lora_rank": None, "rope_parameters": LATENT_YARN, "attention_bias": True},
    ),
    "deepseek_v2-groups": ("deepseek_v2", {**DEEPSEEK, **GROUPS, "topk_method": "group_limited_greedy"}),
    "deepseek_v3": ("deepseek_v3", {**DEEPSEEK, **GROUPS, "rope_parameters": LATENT_YARN}),
    "deepseek_v3-plain": ("deepseek_v3", {**DEEPSEEK, "n_group": 1, "topk_group": 1, "norm_topk_prob": False}),
    "dots1-windows": ("dots1", {**GLM, "sliding_window": 9, "max_window_layers": 1, "first_k_dense_replace": 1}),
    "dots1-groups": ("dots1", {**GLM, **GROUPS, "sliding_window": None, "norm_topk_prob": True}),
    "solar_open-groups": ("solar_open", {**GLM, **GROUPS}),
    "exaone_moe-windows": ("exaone_moe", {**EXAONE, "num_shared_experts": 2, "sliding_window": 9}),
    "ernie4_5_moe-some": ("ernie4_5_moe", {**ERNIE, "moe_layer_end_index": 2, "num_hidden_layers": 4}),
    "ernie4_5_moe-every-second": ("ernie4_5_moe", {**ERNIE, "moe_num_shared_experts": 0, "moe_layer_interval": 2}),
    "hy_v3-biases": (
        "hy_v3",
        {**EXAONE, "num_shared_experts": 2, "attention_bias": True, "router_scaling_factor": 1.7},
    ),
    "axk1-groups": ("axk1", {**DEEPSEEK, **GROUPS, "n_shared_experts": 2}),
    "longcat_flash-most-identity": ("longcat_flash", {**LONGCAT, "zero_expert_num": 5}),
    "longcat_flash-no-identity": ("longcat_flash", {**LONGCAT, "zero_expert_num": 0}),
    "flex_olmo-grouped": ("flex_olmo", {**PAD, **OLMOE, "num_attention_heads": 4}),
    "minimax_m2-half": (
        "minimax_m2",
        {
            **{"num_local_experts": 7, "num_experts_per_tok": 3},
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0, "partial_rotary_factor": 0.5},
        },
    ),
    "dbrx": ("dbrx", DBRX),
    "hunyuan_v1_moe": ("hunyuan_v1_moe", {**HUNYUAN, "rope_parameters": ALPHA}),
    "glm4_moe_lite": ("glm4_moe_lite", {**PAD, **DEEPSEEK, "n_group": 1, "topk_group": 1}),
}
