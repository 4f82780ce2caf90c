"""Tiny configurations that run through transformers' modules: model type -> changes to those of tests/tiny_models."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from app.checkpoints.transformers_catalog import causal_architectures

PAD = {"pad_token_id": 0}
PLAIN_HEADS = {"without": ["num_key_value_heads", "head_dim"]}
NO_SIZE = {"without": ["head_dim"]}
OLD = {"without": ["num_key_value_heads", "head_dim", "intermediate_size"]}
WINDOW = {"sliding_window": 9}
MOE = {
    **{"num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2},
    "moe_intermediate_size": 48,
}
GROUPS = {"n_shared_experts": 1, "n_group": 1, "topk_group": 1}
LATENT = {
    **{"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16},
    "num_key_value_heads": 2,
}
SHARED_GROUPS = {**MOE, "n_shared_experts": 1, "first_k_dense_replace": 1}

# Those that Manta has no modules of its own for.
FURTHER: dict[str, dict[str, Any]] = {
    "afmoe": {**MOE, **WINDOW, "num_dense_layers": 1},
    "apertus": {},
    "arcee": {},
    "bitnet": NO_SIZE,
    "cohere2_moe": {**MOE, **WINDOW},
    "ctrl": {},
    "cwm": {**PAD, **WINDOW},
    "gpt_bigcode": {**OLD, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128, "n_inner": 100},
    "granite_swa": WINDOW,
    "granitemoe_swa": {**MOE, **WINDOW},
    "helium": {},
    "hyperclovax": {},
    "jais2": {},
    "laguna": MOE,
    "mellum": {**MOE, **WINDOW},
    "mimo_v2_flash": {**MOE, **WINDOW},
    "modernbert-decoder": {**PAD, **PLAIN_HEADS, "local_attention": 9},
    "nanochat": {},
    "nemotron": {},
    "olmo": NO_SIZE,
    "persimmon": PLAIN_HEADS,
    "seed_oss": {},
    "starcoder2": {**WINDOW, **NO_SIZE},
    "vaultgemma": WINDOW,
}
# Those that it has, run this way all the same.
NATIVE: dict[str, dict[str, Any]] = {
    "cohere": {},
    "cohere2": {**WINDOW, "num_hidden_layers": 4},
    "deepseek_v2": {**SHARED_GROUPS, **LATENT, "head_dim": 8},
    "deepseek_v3": {**SHARED_GROUPS, **LATENT, "head_dim": 8, "n_group": 2, "topk_group": 1},
    "dots1": {**SHARED_GROUPS, **GROUPS},
    "ernie4_5": PAD,
    "ernie4_5_moe": {
        **MOE,
        **{"moe_num_experts": 4, "moe_k": 2, "moe_num_shared_experts": 1, "moe_layer_start_index": 1},
    },
    "exaone4": {**WINDOW, "num_hidden_layers": 4},
    "exaone_moe": {**MOE, **WINDOW},
    "flex_olmo": {**MOE, **NO_SIZE, **PAD, "num_attention_heads": 4, "num_key_value_heads": 2},
    "gemma": {},
    "gemma2": WINDOW,
    "gemma3_text": {**WINDOW, "num_hidden_layers": 7},
    "gemma4_text": {},
    "glm": PAD,
    "glm4": PAD,
    "glm4_moe": {**SHARED_GROUPS, **GROUPS, **PAD},
    "glm4_moe_lite": {**MOE, **GROUPS, **LATENT, **PAD},
    "gpt2": {**OLD, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 128, "n_inner": 100},
    "gpt_neox": {**PLAIN_HEADS, "num_attention_heads": 4, "max_position_embeddings": 128},
    "gpt_oss": {**MOE, **WINDOW},
    "granite": {},
    "granitemoe": {**MOE, **NO_SIZE},
    "granitemoeshared": {**MOE, **NO_SIZE, "shared_intermediate_size": 48},
    "hunyuan_v1_dense": {},
    "hunyuan_v1_moe": {**MOE, "moe_topk": 2},
    "hy_v3": MOE,
    "llama": {},
    "minicpm3": {**LATENT, "head_dim": 8},
    "minimax_m2": MOE,
    "ministral": WINDOW,
    "ministral3": {},
    "mistral": WINDOW,
    "mixtral": {**MOE, **WINDOW},
    "olmo2": {},
    "olmo3": {**WINDOW, "num_hidden_layers": 4},
    "olmoe": {**MOE, **NO_SIZE},
    "phi": {"num_key_value_heads": 2},
    "phi3": {**PAD, "sliding_window": 11},
    "phimoe": {**MOE, **NO_SIZE, **WINDOW},
    "qwen2": {},
    "qwen2_moe": {**MOE, **NO_SIZE, "shared_expert_intermediate_size": 48},
    "qwen3": {},
    "qwen3_moe": MOE,
    "smollm3": {**PAD, "num_hidden_layers": 4},
    "solar_open": {**MOE, **GROUPS, **PAD},
    "youtu": {**LATENT, "head_dim": 8},
}
ARCHITECTURES = {**FURTHER, **NATIVE}


def page_table(model_types: Iterable[str]) -> str:
    """The table of docs/models.md."""
    classes = {model_type: name for name, types in causal_architectures().items() for model_type in types}
    lines = ["| architecture | model type | |", "|---|---|---|"]
    for model_type in sorted(model_types):
        changes = ARCHITECTURES[model_type]
        kinds = [kind for key, kind in _KINDS.items() if key in changes]
        lines.append(f"| `{classes[model_type]}` | {model_type} | {', '.join(kinds)} |")
    return "\n".join(lines)


_KINDS = {
    "num_experts_per_tok": "mixture of experts",
    "kv_lora_rank": "latent attention",
    "sliding_window": "windows",
    "local_attention": "windows",
}

OUTSIDE = "does not take an implementation from outside"
# What cannot run: changes, and the reason that a user reads.
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "diffllama": ({**NO_SIZE, "num_attention_heads": 4, "num_key_value_heads": 2}, "more than once in a step"),
    "doge": ({}, "its forward pass needs more than shapes and positions"),
    "jetmoe": (
        {**MOE, **NO_SIZE, "kv_channels": 16, "num_key_value_heads": 2},
        "its forward pass needs more than shapes and positions",
    ),
    "bloom": ({**OLD, "n_layer": 2, "n_head": 4}, OUTSIDE),
    "gptj": ({**OLD, "n_embd": 64, "n_layer": 2, "n_head": 4, "rotary_dim": 8}, OUTSIDE),
    "biogpt": (PLAIN_HEADS, OUTSIDE),
}
