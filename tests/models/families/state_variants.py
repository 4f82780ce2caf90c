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
# name: (transformers' model type, changes to the tiny configuration)
STATE_VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_next": ("qwen3_next", {**DELTA, **EXPERTS}),
    "qwen3_next-dense": (
        "qwen3_next",
        {**DELTA, **EXPERTS, "mlp_only_layers": [1], "layer_types": ["full_attention", *["linear_attention"] * 3]},
    ),
    "qwen3_5": ("qwen3_5_text", {**DELTA, "tie_word_embeddings": True}),
    "qwen3_5_moe": ("qwen3_5_moe_text", {**DELTA, **EXPERTS}),
}
