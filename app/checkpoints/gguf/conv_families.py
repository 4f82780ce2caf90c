"""LFM2 as llama.cpp has it, with experts or without: layers with a count of 0 heads of keys are short convolutions, and
the norm behind the last layer has the name of one of embeddings (conversion/lfm2.py)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from app.checkpoints.gguf.architecture import LAYER, Architecture
from app.checkpoints.gguf.expert_families import QWEN, SHARED
from app.checkpoints.gguf.header import GgufHeader
from app.checkpoints.gguf.keys import Keys
from app.checkpoints.gguf.state_places import arranged_states, has

_CONV = {
    "shortconv.conv": "conv.conv",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.out_proj": "conv.out_proj",
    "token_embd_norm": "model.norm",
}


def _derived(keys: Keys, header: GgufHeader) -> Mapping[str, Any]:
    heads = keys.of_layers("attention.head_count_kv")
    return {
        "layer_types": ["full_attention" if number else "conv" for number in heads],
        "norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "block_auto_adjust_ff_dim": False,
        "conv_bias": has(header, "shortconv.conv.bias"),
        "num_dense_layers": keys.size("leading_dense_block_count") or 0,
        "use_expert_bias": has(header, "exp_probs_b.bias"),
    }


_SIZES = {"conv_L_cache": "shortconv.l_cache"}
CONV_FAMILIES = {
    "lfm2": Architecture(
        *("lfm2", "Lfm2ForCausalLM", LAYER | _CONV),
        sizes=_SIZES, derived=_derived, zeros_are_none=True, arranged=arranged_states,
    ),
    "lfm2moe": Architecture(
        *("lfm2_moe", "Lfm2MoeForCausalLM", SHARED | _CONV),
        sizes=_SIZES | QWEN, derived=_derived, zeros_are_none=True, arranged=arranged_states,
    ),
}  # fmt: skip
