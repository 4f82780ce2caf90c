"""The fields of config.json that families read alike, each with its kind and range. No torch (I8).

Checked before a family reads them, so that errors name the field, no size makes a start run out of memory, and no
number makes a model that computes NaN.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from app.checkpoints.fields.kinds import FLAG, OBJECT, TEXT, Kind, check, either, expect, number, several, whole

_LAYER_COUNT = 1 << 14
_SIZE, _MAYBE_NONE = whole(1, 1 << 30), whole(0, 1 << 30)  # where 0 may say that there is none
_LAYERS, _EXPERTS = whole(1, _LAYER_COUNT), whole(0, 1 << 16)
_EPS, _BASE = number(above=0, most=1), number(above=0, most=1e15)
_FACTOR, _MAYBE_ZERO, _PART = number(above=0, most=1e9), number(0, 1e9), number(above=0, most=1)
_LABELS = 1 << 16
# Kernels of recurrent layers hold a head's state in registers, and go through all places of a convolution.
_STATE_TYPE = Kind("float32, bfloat16 or float16", lambda value: value in ("float32", "bfloat16", "float16"))
_HEAD_WIDTH, _STATE_WIDTH, _CONV_WIDTH = whole(1, 128), whole(1, 256), whole(2, 16)

_BLOCKS = ("full_attention", "linear_attention", "mlp")

ROPE_FIELDS: Mapping[str, Kind] = {
    "rope_type": TEXT,
    "type": TEXT,
    "rope_theta": _BASE,
    "partial_rotary_factor": _PART,
    "original_max_position_embeddings": _SIZE,
    **dict.fromkeys(("factor", "beta_fast", "beta_slow", "low_freq_factor", "high_freq_factor"), _FACTOR),
    "attention_factor": _FACTOR,
    **dict.fromkeys(("mixed_b", "mscale", "mscale_all_dim", "llama_4_scaling_beta", "alpha"), _MAYBE_ZERO),
    **dict.fromkeys(("long_factor", "short_factor"), several(_FACTOR, 1 << 12)),
    "truncate": FLAG,
    "mrope_section": several(_SIZE, 3),
    "mrope_interleaved": FLAG,
}

LINEAR_FIELDS: Mapping[str, Kind] = {
    **{"head_dim": _HEAD_WIDTH, "num_heads": _SIZE, "short_conv_kernel_size": _CONV_WIDTH},
    **dict.fromkeys(("full_attn_layers", "kda_layers"), several(whole(1, _LAYER_COUNT), _LAYER_COUNT)),
}

LAYER_FIELDS: Mapping[str, Kind] = dict.fromkeys(("head_dim", "num_key_value_heads"), _SIZE)

# What is read of every model, also of one that transformers' modules run.
COMMON_FIELDS: Mapping[str, Kind] = {"vocab_size": _SIZE, "tie_word_embeddings": FLAG}

FIELDS: Mapping[str, Kind] = {
    **COMMON_FIELDS,
    **dict.fromkeys(("hidden_size", "n_embd", "num_attention_heads", "n_head"), _SIZE),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "n_head_kv"), _SIZE),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "original_max_position_embeddings"), _SIZE),
    **dict.fromkeys(("attention_chunk_size", "moe_intermediate_size", "floor_scale"), _SIZE),
    **dict.fromkeys(("kv_lora_rank", "qk_rope_head_dim", "v_head_dim", "word_embed_proj_dim"), _SIZE),
    **dict.fromkeys(("d_model", "n_heads", "kv_n_heads", "max_seq_len", "expert_ffn_hidden_size"), _SIZE),
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size"), _MAYBE_NONE),
    **dict.fromkeys(("head_dim", "attention_head_dim", "intermediate_size_mlp", "rotary_dim"), _MAYBE_NONE),
    **dict.fromkeys(("shared_expert_intermediate_size", "shared_intermediate_size"), _MAYBE_NONE),
    **dict.fromkeys(("q_lora_rank", "qk_nope_head_dim", "n_group", "topk_group"), _MAYBE_NONE),
    **dict.fromkeys(("interleave_moe_layer_step", "decoder_sparse_step", "moe_layer_interval"), _SIZE),
    "first_k_dense_replace": _MAYBE_NONE,
    **dict.fromkeys(("sliding_window", "max_window_layers", "no_rope_layer_interval"), _MAYBE_NONE),
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads", "full_attention_interval"), _SIZE),
    **dict.fromkeys(("linear_key_head_dim", "linear_head_dim", "mamba_head_dim"), _HEAD_WIDTH),
    "linear_value_head_dim": _STATE_WIDTH,
    **dict.fromkeys(("linear_num_heads", "model_max_length"), _SIZE),
    **dict.fromkeys(("linear_allow_neg_eigval", "postnorm", "mla_use_nope", "moe_renormalize"), FLAG),
    "attn_type_list": several(whole(0, 1), _LAYER_COUNT),
    **dict.fromkeys((f"{kind}_attn_{end}_factor" for kind in ("full", "linear") for end in ("alpha", "beta")), _FACTOR),
    **dict.fromkeys((f"layernorm_{kind}_{end}" for kind in _BLOCKS for end in ("alpha", "beta")), _FACTOR),
    **dict.fromkeys(("mlp_alpha_factor", "mlp_beta_factor"), _FACTOR),
    **dict.fromkeys(("moe_shared_expert_intermediate_size", "moe_latent_size"), _MAYBE_NONE),
    **dict.fromkeys(("num_experts_per_token", "num_expert_group"), _EXPERTS),
    "moe_router_activation_func": TEXT,
    **dict.fromkeys(("linear_attn_config", "per_layer_config"), OBJECT),
    **dict.fromkeys(("global_head_dim", "num_global_key_value_heads", "vocab_size_per_layer_input"), _SIZE),
    **dict.fromkeys(("hidden_size_per_layer_input", "num_kv_shared_layers", "top_k_experts"), _MAYBE_NONE),
    **dict.fromkeys(("attention_k_eq_v", "enable_moe_block", "use_double_wide_mlp"), FLAG),
    "use_bidirectional_attention": either(FLAG, TEXT),
    **dict.fromkeys(("state_size", "ssm_state_size", "mamba_d_state"), _STATE_WIDTH),
    **dict.fromkeys(("linear_conv_kernel_dim", "conv_kernel", "mamba_d_conv", "conv_L_cache"), _CONV_WIDTH),
    **dict.fromkeys(
        ("mamba_n_heads", "mamba_num_heads", "mamba_n_groups", "n_groups", "mamba_d_ssm", "num_heads"), _SIZE
    ),
    **dict.fromkeys(("n_mamba_heads", "mamba_ngroups", "num_mem_blocks", "adapter_rank"), _SIZE),
    **dict.fromkeys(("use_shared_attention_adapter", "use_mem_rope"), FLAG),
    **dict.fromkeys(("mamba_ssm_dtype", "mamba_ssm_cache_dtype"), _STATE_TYPE),
    **dict.fromkeys(("mamba_expand", "expand", "attn_layer_period", "expert_layer_period"), _SIZE),
    **dict.fromkeys(("attn_layer_offset", "expert_layer_offset", "num_dense_layers"), _MAYBE_NONE),
    **dict.fromkeys(("time_step_rank", "mamba_dt_rank", "mamba_d_head"), either(_SIZE, TEXT)),
    **dict.fromkeys(("time_step_limit",), several(either(_MAYBE_ZERO, TEXT, OBJECT), 2)),
    **dict.fromkeys(("time_step_min", "mixer_rms_eps"), _MAYBE_ZERO),
    **dict.fromkeys(("use_conv_bias", "mamba_conv_bias", "mamba_proj_bias", "conv_bias"), FLAG),
    **dict.fromkeys(("mamba_norm_before_gate", "mamba_rms_norm", "use_expert_bias", "tie_embedding"), FLAG),
    **dict.fromkeys(("layers_block_type",), several(TEXT, _LAYER_COUNT)),
    "hybrid_override_pattern": TEXT,
    "attn_layer_indices": several(whole(0, _LAYER_COUNT), _LAYER_COUNT),
    **dict.fromkeys(("moe_layer_start_index", "type_vocab_size"), _MAYBE_NONE),
    **dict.fromkeys(("dim", "embedding_size", "local_attention", "global_attn_every_n_layers"), _SIZE),
    **dict.fromkeys(("d_ff", "hidden_dim", "conv_kernel_size"), _MAYBE_NONE),
    **dict.fromkeys(("d_kv", "relative_attention_max_distance"), _SIZE),
    "relative_attention_num_buckets": whole(4, 1 << 20),
    **dict.fromkeys(("position_buckets", "max_relative_positions"), whole(-1, 1 << 20)),
    "sliding_window_pattern": either(_MAYBE_NONE, TEXT),  # EXAONE's is LLLG
    "moe_layer_end_index": whole(-1, _LAYER_COUNT),
    "pad_token_id": whole(-1, 1 << 30),
    "num_ln_in_parallel_attn": whole(0, 2),
    "num_labels": whole(0, _LABELS),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), _LAYERS),
    **dict.fromkeys(("encoder_layers", "decoder_layers"), _LAYERS),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads", "max_target_positions"), _SIZE),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), _SIZE),
    **dict.fromkeys(("num_mel_bins", "max_source_positions"), whole(1, 1 << 16)),
    "scale_embedding": FLAG,
    **dict.fromkeys(("multi_query_group_num", "laurel_rank", "moe_every_n_layers"), _SIZE),
    **dict.fromkeys(("window_size", "keep_window_size"), _MAYBE_NONE),
    "altup_num_inputs": whole(1, 64),
    **dict.fromkeys(("alibi_bias_max", "rope_ratio", "expansion_ratio"), _FACTOR),
    "moe_normalize_expert_weights": either(FLAG, _FACTOR),  # DBRX's is the power of a norm
    **dict.fromkeys(("add_bias_linear", "add_qkv_bias", "altup_correct_scale", "is_moe"), FLAG),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "n_shared_experts"), _EXPERTS),
    **dict.fromkeys(("num_experts_per_tok", "moe_num_experts", "moe_num_shared_experts", "moe_k"), _EXPERTS),
    **dict.fromkeys(("num_shared_experts", "num_shared_expert", "moe_topk", "moe_top_k"), _EXPERTS),
    "zero_expert_num": _EXPERTS,
    **dict.fromkeys(("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps"), _EPS),
    **dict.fromkeys(("rope_theta", "rotary_emb_base", "rope_local_base_freq"), _BASE),
    **dict.fromkeys(("global_rope_theta", "local_rope_theta"), _BASE),
    **dict.fromkeys(("rotary_pct", "partial_rotary_factor"), _PART),
    **dict.fromkeys(("embedding_multiplier", "residual_multiplier", "attention_multiplier"), _FACTOR),
    **dict.fromkeys(("key_multiplier", "lm_head_multiplier", "ssm_in_multiplier", "ssm_out_multiplier"), _FACTOR),
    **dict.fromkeys(("attention_in_multiplier", "attention_out_multiplier", "block_ffn_dim_multiplier"), _FACTOR),
    "mlp_multipliers": several(_FACTOR, 2),
    "ssm_multipliers": several(_FACTOR, 5),
    **dict.fromkeys(("block_ff_dim", "block_multiple_of"), _SIZE),
    "full_attn_idxs": several(whole(0, _LAYER_COUNT), _LAYER_COUNT),
    **dict.fromkeys(("logits_scaling", "logit_scale", "routed_scaling_factor", "query_pre_attn_scalar"), _FACTOR),
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping", "swiglu_limit", "clip_qkv"), _FACTOR),
    **dict.fromkeys(("dim_model_base", "scale_depth", "scale_emb"), _FACTOR),
    **dict.fromkeys(("attn_scale", "router_jitter_noise"), _MAYBE_ZERO),
    **dict.fromkeys(("attention_bias", "mlp_bias", "qkv_bias", "use_qkv_bias", "use_bias", "bias"), FLAG),
    **dict.fromkeys(("lm_head_bias", "enable_bias", "use_qk_norm", "qk_layernorm", "norm_topk_prob"), FLAG),
    **dict.fromkeys(("use_sliding_window", "rope_interleave", "use_cla", "alibi", "multi_query"), FLAG),
    **dict.fromkeys(("new_decoder_architecture", "parallel_attn", "use_parallel_residual"), FLAG),
    **dict.fromkeys(("do_layer_norm_before", "layer_norm_elementwise_affine", "_remove_final_layer_norm"), FLAG),
    **dict.fromkeys(("is_encoder_decoder", "is_decoder", "is_causal", "add_cross_attention"), FLAG),
    **dict.fromkeys(("relative_attention", "position_biased_input", "share_att_key", "norm_bias"), FLAG),
    **dict.fromkeys(("is_matryoshka", "classifier_bias", "is_original_qwen3_reranker"), FLAG),
    "classifier_from_token": several(TEXT, 2),
    **dict.fromkeys(("method", "jina_task", "emb_pooler", "feed_forward_type"), TEXT),
    **{"lora_adaptations": several(TEXT, 64), "lora_rank": whole(1, 1 << 16), "lora_alpha": _FACTOR},
    **dict.fromkeys(("classifier_pooling", "classifier_activation", "feed_forward_proj", "activation"), TEXT),
    **dict.fromkeys(("norm_rel_ebd", "position_embedding_type"), TEXT),
    **dict.fromkeys(("pooling", "temperature"), either(TEXT, _MAYBE_ZERO)),  # of llama_bidirec; others have their own
    "pos_att_type": either(TEXT, several(TEXT, 4)),
    "attn_temperature_tuning": either(FLAG, whole(0, 1 << 10)),  # Llama 4 was published with 4
    **dict.fromkeys(("layer_types", "mlp_layer_types"), several(TEXT, _LAYER_COUNT)),
    "no_rope_layers": several(either(FLAG, whole(0, 1)), _LAYER_COUNT),
    **dict.fromkeys(("moe_layers", "mlp_only_layers"), several(whole(0, _LAYER_COUNT), _LAYER_COUNT)),
    "moe_layer_freq": either(_SIZE, several(whole(0, 1), _LAYER_COUNT)),
    "matryoshka_dimensions": several(_SIZE, 1 << 12),
    **dict.fromkeys(("rope_parameters", "rope_scaling", "sentence_transformers"), OBJECT),
    "id2label": Kind(f"an object of at most {_LABELS:,}", lambda value: OBJECT.holds(value) and len(value) <= _LABELS),
}


def check_config(config: Mapping[str, Any], file: str, fields: Mapping[str, Kind] = FIELDS) -> None:
    """CheckpointError names a field of config.json that holds something else; null is what is left out."""
    check(config, fields, file)
    if fields is not FIELDS:
        return
    check(config.get("linear_attn_config") or {}, LINEAR_FIELDS, file, "linear_attn_config.")
    for place, own in (config.get("per_layer_config") or {}).items():
        expect(own, OBJECT, f"{file} is not usable: per_layer_config.{place}")
        check(own, LAYER_FIELDS, file, f"per_layer_config.{place}.")
    for name in ("rope_parameters", "rope_scaling"):
        rope = config.get(name) or {}
        check(rope, ROPE_FIELDS, file, f"{name}.")
        for layer_type, own in rope.items():
            if isinstance(own, Mapping):
                check(own, ROPE_FIELDS, file, f"{name}.{layer_type}.")
