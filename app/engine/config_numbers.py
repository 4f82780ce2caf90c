"""What fields of config.json may hold that families read alike: whole numbers, numbers, objects. No torch (I8).

Checked before a family reads them, so that errors name the field, and no size makes a start run out of memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from app.errors import CheckpointError

_SIZES = (
    *("hidden_size", "n_embd", "num_attention_heads", "n_head", "num_key_value_heads", "num_kv_heads", "n_head_kv"),
    *("vocab_size", "max_position_embeddings", "n_positions", "attention_chunk_size", "moe_intermediate_size"),
    *("kv_lora_rank", "qk_rope_head_dim", "v_head_dim", "word_embed_proj_dim"),
    *("d_model", "n_heads", "kv_n_heads", "max_seq_len", "expert_ffn_hidden_size"),
)
_MAYBE_NONE = (  # where 0 may say that there is none
    *("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "head_dim", "intermediate_size_mlp"),
    *("shared_expert_intermediate_size", "shared_intermediate_size", "q_lora_rank", "qk_nope_head_dim"),
    *("n_group", "topk_group", "first_k_dense_replace", "interleave_moe_layer_step", "decoder_sparse_step"),
    *("max_window_layers", "no_rope_layer_interval", "moe_layer_interval", "moe_layer_start_index", "type_vocab_size"),
    "rotary_dim",
)
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_EXPERTS = (
    *("num_experts", "num_local_experts", "n_routed_experts", "n_shared_experts", "num_experts_per_tok"),
    *("moe_num_experts", "moe_num_shared_experts", "moe_k", "num_shared_experts"),
    *("moe_topk", "moe_top_k", "num_shared_expert", "zero_expert_num"),
)
_NUMBERS = (
    *("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "rope_theta", "routed_scaling_factor", "swiglu_limit"),
    *("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling", "logit_scale"),
    *("attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar", "clip_qkv", "attn_scale"),
    *("dim_model_base", "router_jitter_noise", "scale_depth", "scale_emb"),
)
_OBJECTS = ("rope_parameters", "rope_scaling")

_Field = tuple[str, Callable[[Any], bool]]


def _whole(least: int, most: int) -> _Field:
    def holds(value: Any) -> bool:
        return _is_number(value) and least <= value <= most and value == int(value)

    return f"a whole number from {least} to {most:,}", holds


def _is_number(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return isinstance(value, int) or math.isfinite(value)


_FIELDS: Mapping[str, _Field] = {
    **dict.fromkeys(_SIZES, _whole(1, 1 << 30)),
    **dict.fromkeys(_MAYBE_NONE, _whole(0, 1 << 30)),
    **dict.fromkeys(_LAYERS, _whole(1, 1 << 14)),
    **dict.fromkeys(_EXPERTS, _whole(0, 1 << 16)),
    **dict.fromkeys(_NUMBERS, ("a number", _is_number)),
    **dict.fromkeys(_OBJECTS, ("an object", lambda value: isinstance(value, Mapping))),
}


def check_numbers(config: Mapping[str, Any], file: str) -> None:
    """CheckpointError names a field of a family's config.json that holds something else; null is what is left out."""
    for name, (expected, holds) in _FIELDS.items():
        value = config.get(name)
        if value is not None and not holds(value):
            raise CheckpointError(f"{file} is not usable: {name} is {value!r:.80}, not {expected}", param="model")
