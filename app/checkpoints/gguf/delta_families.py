"""Families with gated delta nets as llama.cpp has them: Qwen3-Next, Qwen 3.5 and 3.6.

Its converter (conversion/qwen.py) writes -exp(A_log), drops the middle of a convolution's sizes, has projections part
by part, and in Qwen 3.5 the heads of values not beside those with the same key, but one of each key after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from app.checkpoints.gguf.architecture import LAYER, Architecture
from app.checkpoints.gguf.blocks import BLOCK_TYPES
from app.checkpoints.gguf.expert_families import QWEN, SHARED, WIDE_SHARED
from app.checkpoints.gguf.header import GgufHeader
from app.checkpoints.gguf.keys import Keys
from app.checkpoints.gguf.state_places import Place, arranged_states
from app.errors import CheckpointError

_NET = ".linear_attn."
_DELTA = {
    "post_attention_norm": "post_attention_layernorm",
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_ba": "linear_attn.in_proj_ba",
    "ssm_a": "linear_attn.A_log",
    "ssm_dt.bias": "linear_attn.dt_bias",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}
_SIZES = {
    "linear_conv_kernel_dim": "ssm.conv_kernel",
    "linear_key_head_dim": "ssm.state_size",
    "linear_num_key_heads": "ssm.group_count",
    "linear_num_value_heads": "ssm.time_step_rank",
}
# What has heads of values, and behind how many rows of queries and keys: twice those of all key heads, or none.
_OF_VALUES = {"in_proj_v.weight": 0, "in_proj_z.weight": 0, "in_proj_a.weight": 0, "in_proj_b.weight": 0}
_OF_VALUES |= {"A_log": 0, "dt_bias": 0, "conv1d.weight": 2}


def _derived(keys: Keys, header: GgufHeader) -> Mapping[str, Any]:
    heads = keys.needed("ssm.time_step_rank")
    inner = keys.needed("ssm.inner_size")
    if inner % heads:
        raise CheckpointError(f"GGUF: ssm.inner_size is {inner}, no {heads} heads", param="model")
    interval = keys.size("full_attention_interval")
    return {"linear_value_head_dim": inner // heads, "full_attention_interval": 4 if interval is None else interval}


def _arranged(places: Mapping[str, Place], config: Mapping[str, Any]) -> dict[str, Place]:
    """Places under the names that a delta net of ours has. CheckpointError: a shape is not of the heads."""
    found: dict[str, Place] = {}
    for name, place in arranged_states(places, config).items():
        found |= _of_net(name, place, config)
    return found


def _arranged_by_keys(places: Mapping[str, Place], config: Mapping[str, Any]) -> dict[str, Place]:
    """The same of files whose heads of values lie one of each key after the other."""
    keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    found = _arranged(places, config)
    if keys == values:
        return found
    if values % keys:
        raise CheckpointError(f"GGUF: {values} heads of values for {keys} of keys", param="model")
    for name, place in found.items():
        part = name.rpartition(_NET)[2]
        if part == "out_proj.weight":
            _reorder_columns(place, keys, values, config["linear_value_head_dim"])
        elif part in _OF_VALUES and _NET in name:
            first = _OF_VALUES[part] * keys * config["linear_key_head_dim"]
            if (place["shape"][0] - first) % values:
                raise CheckpointError(f"GGUF: {name} has shape {place['shape']}, no {values} heads", param="model")
            place["tiled"] = {"axis": 0, "first": first, "keys": keys, "each": values // keys}
    return found


def _of_net(name: str, place: Place, config: Mapping[str, Any]) -> dict[str, Place]:
    if not name.endswith(".in_proj_qkv.weight"):
        return {name: place}
    keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    values = config["linear_num_value_heads"] * config["linear_value_head_dim"]
    rows, columns = place["shape"] if len(place["shape"]) == 2 else (0, 0)
    if rows != 2 * keys + values:
        raise CheckpointError(f"GGUF: {name} has shape {place['shape']}, not {2 * keys + values} rows", param="model")
    block, parts, begin = BLOCK_TYPES[place["type"]], {}, place["begin"]
    for which, count in (("q", keys), ("k", keys), ("v", values)):
        parts[name.replace("_qkv", f"_{which}")] = {**place, "shape": [count, columns], "begin": begin}
        begin += count * columns // block.size * block.num_bytes
    return parts


def _reorder_columns(place: Place, keys: int, values: int, size: int) -> None:
    """Blocks that hold numbers of several heads are no longer blocks then: the weight is read as numbers."""
    if place["shape"][1] != values * size:
        raise CheckpointError(f"GGUF: out_proj has shape {place['shape']}, no {values} heads of {size}", param="model")
    if size % BLOCK_TYPES[place["type"]].size:
        place["numbers"] = True
    place["tiled"] = {"axis": 1, "first": 0, "keys": keys, "each": values // keys}


def _family(model_type: str, causal_class: str, arranged: Callable[..., Any], *, experts: bool) -> Architecture:
    """One of them. Norms are Gemma's, but that of what a state answers; layers of experts have no other width."""
    sizes = {**_SIZES, **QWEN, **WIDE_SHARED, "intermediate_size": "expert_feed_forward_length"} if experts else _SIZES
    return Architecture(
        *(model_type, causal_class, (SHARED if experts else LAYER) | _DELTA),
        sizes=sizes, derived=_derived, norm_offset=1.0, plain_norm=f"{_NET}norm.weight", arranged=arranged,
    )  # fmt: skip


DELTA_FAMILIES = {
    "qwen3next": _family("qwen3_next", "Qwen3NextForCausalLM", _arranged, experts=True),
    "qwen35": _family("qwen3_5_text", "Qwen3_5ForCausalLM", _arranged_by_keys, experts=False),
    "qwen35moe": _family("qwen3_5_moe_text", "Qwen3_5MoeForCausalLM", _arranged_by_keys, experts=True),
}
