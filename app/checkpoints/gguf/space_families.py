"""Nemotron-H as llama.cpp has it: a layer is a Mamba 2, attention or a feed-forward layer, as counts of each layer say.

Its converter (conversion/nemotron.py over Mamba2Model) writes -exp(A_log), has vectors of heads as columns and weights
of norms by groups, and drops the middle of a convolution's sizes.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

from app.checkpoints.gguf.architecture import Architecture
from app.checkpoints.gguf.blocks import BLOCK_TYPES
from app.checkpoints.gguf.header import GgufHeader
from app.checkpoints.gguf.keys import Keys
from app.errors import CheckpointError

_MIXER = ".mixer."
_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "mixer.q_proj",
    "attn_k": "mixer.k_proj",
    "attn_v": "mixer.v_proj",
    "attn_output": "mixer.o_proj",
    "ffn_up": "mixer.up_proj",
    "ffn_down": "mixer.down_proj",
    "ssm_in": "mixer.in_proj",
    "ssm_conv1d": "mixer.conv1d",
    "ssm_a": "mixer.A_log",
    "ssm_d": "mixer.D",
    "ssm_dt.bias": "mixer.dt_bias",
    "ssm_norm": "mixer.norm",
    "ssm_out": "mixer.out_proj",
}
_SIZES = {
    "mamba_num_heads": "ssm.time_step_rank",
    "n_groups": "ssm.group_count",
    "ssm_state_size": "ssm.state_size",
    "conv_kernel": "ssm.conv_kernel",
}
_FLAT = ("A_log", "D", "norm.weight")  # parts that are vectors
Place = dict[str, Any]


def _derived(keys: Keys, header: GgufHeader) -> Mapping[str, Any]:
    heads = keys.must("ssm.time_step_rank", keys.size("ssm.time_step_rank"))
    inner = keys.must("ssm.inner_size", keys.size("ssm.inner_size"))
    if not heads or inner % heads:
        raise CheckpointError(f"GGUF: ssm.inner_size is {inner}, no {heads} heads", param="model")
    return {
        "hybrid_override_pattern": _pattern(keys),
        "mamba_head_dim": inner // heads,
        "layer_norm_epsilon": keys.number("attention.layer_norm_rms_epsilon"),
        "use_conv_bias": _has(header, "ssm_conv1d.bias"),
        "use_bias": _has(header, "ssm_in.bias"),
        "mlp_bias": _has(header, "ffn_up.bias"),
    }


def _pattern(keys: Keys) -> str:
    """A mark for each layer: those with heads of keys attend, those with a width feed forward."""
    count = keys.must("block_count", keys.size("block_count"))
    heads, widths = keys.of_layers("attention.head_count_kv"), keys.of_layers("feed_forward_length")
    for key, values in (("attention.head_count_kv", heads), ("feed_forward_length", widths)):
        if len(values) != count:
            raise CheckpointError(f"GGUF: {key} has {len(values)} entries for {count} layers", param="model")
    both = [index for index in range(count) if heads[index] and widths[index]]
    if both:
        raise CheckpointError(f"GGUF: layer {both[0]} both attends and feeds forward", param="model")
    return "".join("*" if head else "-" if width else "M" for head, width in zip(heads, widths, strict=True))


def _has(header: GgufHeader, end: str) -> bool:
    return any(name.endswith(end) for name in header.tensors)


def _arranged(places: Mapping[str, Place], config: Mapping[str, Any]) -> dict[str, Place]:
    """Places under the names that a Mamba 2 layer of ours has. CheckpointError: a shape is not of the heads."""
    found: dict[str, Place] = {}
    for name, place in places.items():
        part = name.rpartition(_MIXER)[2]
        if part.startswith("in_proj."):
            found |= _parts(name, place, config)
        elif part in _FLAT and _MIXER in name:
            found[name] = {**place, "shape": [prod(place["shape"])], **({"logs": True} if part == "A_log" else {})}
        elif part == "conv1d.weight" and len(place["shape"]) == 2:
            channels, width = place["shape"]
            found[name] = {**place, "shape": [channels, 1, width]}
        else:
            found[name] = place
    return found


def _parts(name: str, place: Place, config: Mapping[str, Any]) -> dict[str, Place]:
    """Rows of gates, channels, both sides of the states, and steps."""
    heads = config["mamba_num_heads"]
    channels, groups = heads * config["mamba_head_dim"], config["n_groups"] * config["ssm_state_size"]
    sizes = {"z": channels, "x": channels, "b": groups, "c": groups, "dt": heads}
    rows, *columns = place["shape"]
    if rows != sum(sizes.values()):
        raise CheckpointError(f"GGUF: {name} has shape {place['shape']}, not {sum(sizes.values())} rows", param="model")
    block, parts, begin = BLOCK_TYPES[place["type"]], {}, place["begin"]
    for part, count in sizes.items():
        parts[name.replace("in_proj.", f"in_proj_{part}.")] = {**place, "shape": [count, *columns], "begin": begin}
        begin += count * prod(columns) // block.size * block.num_bytes
    return parts


SPACE_FAMILIES = {
    "nemotron_h": Architecture(
        *("nemotron_h", "NemotronHForCausalLM", _NAMES, {"mlp_hidden_act": "relu2"}),
        sizes=_SIZES, derived=_derived, zeros_are_none=True, arranged=_arranged,
    ),
}  # fmt: skip
