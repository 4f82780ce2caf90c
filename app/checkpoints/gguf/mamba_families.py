"""Families with Mamba 1 as llama.cpp has them: Mamba and FalconMamba, which share a name, and Jamba, whose kinds of
layers follow from heads and tensors of each (conversion/mamba.py, jamba.py)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from app.checkpoints.gguf.architecture import LAYER, Architecture
from app.checkpoints.gguf.expert_families import EXPERTS
from app.checkpoints.gguf.header import GgufHeader
from app.checkpoints.gguf.keys import Keys
from app.checkpoints.gguf.state_places import arranged_states, has
from app.errors import CheckpointError, UnsupportedError


def _names(layer: str) -> dict[str, str]:
    parts = {"ssm_in": "in_proj", "ssm_conv1d": "conv1d", "ssm_x": "x_proj", "ssm_dt": "dt_proj", "ssm_a": "A_log"}
    parts |= {"ssm_d": "D", "ssm_out": "out_proj"}
    parts |= {f"ssm_{part}_norm": f"{part}_layernorm" for part in ("dt", "b", "c")}
    return {name: f"{layer}.{part}" for name, part in parts.items()}


def _mamba(keys: Keys, header: GgufHeader) -> Mapping[str, Any]:
    return {
        "layer_norm_epsilon": keys.number("attention.layer_norm_rms_epsilon"),
        "use_conv_bias": has(header, "ssm_conv1d.bias"),
        "use_bias": has(header, "ssm_in.bias"),
    }


def _jamba(keys: Keys, header: GgufHeader) -> Mapping[str, Any]:
    hidden = keys.needed("embedding_length")
    inner = keys.needed("ssm.inner_size")
    if inner % hidden:
        raise CheckpointError(f"GGUF: ssm.inner_size is {inner}, no multiple of {hidden}", param="model")
    attend = [bool(heads) for heads in keys.of_layers("attention.head_count_kv")]
    chosen = [f"blk.{index}.ffn_gate_inp.weight" in header.tensors for index in range(len(attend))]
    return {
        "mamba_expand": inner // hidden,
        "mamba_conv_bias": has(header, "ssm_conv1d.bias"),
        "mamba_proj_bias": has(header, "ssm_in.bias"),
        "num_experts": (keys.size("expert_count") or 0) if any(chosen) else 0,
        "num_experts_per_tok": keys.size("expert_used_count") or 0,
        **_every("attn_layer", attend),
        **_every("expert_layer", chosen),
    }


def _every(what: str, layers: Sequence[bool]) -> dict[str, int]:
    """Period and offset of the layers that are such; UnsupportedError where they do not come in turn."""
    found = [index for index, is_such in enumerate(layers) if is_such]
    offset = found[0] if found else len(layers)
    period = found[1] - found[0] if len(found) > 1 else len(layers) + 1
    if (found and offset >= period) or found != list(range(offset, len(layers), period)):
        raise UnsupportedError(f"GGUF: layers {found[:8]} are no {what}_period and {what}_offset", param="model")
    return {f"{what}_period": period, f"{what}_offset": offset}


def _architecture(model_type: str, causal_class: str) -> Architecture:
    return Architecture(
        *(model_type, causal_class, {"attn_norm": "input_layernorm"} | _names("mixer")),
        sizes={
            "intermediate_size": "ssm.inner_size",
            "state_size": "ssm.state_size",
            "conv_kernel": "ssm.conv_kernel",
            "time_step_rank": "ssm.time_step_rank",
        },
        derived=_mamba, attends=False, arranged=arranged_states,
    )  # fmt: skip


FALCON_MAMBA = _architecture("falcon_mamba", "FalconMambaForCausalLM")  # "mamba" that norms dt, B and C
MAMBA_FAMILIES = {
    "mamba": _architecture("mamba", "MambaForCausalLM"),
    "jamba": Architecture(
        *("jamba", "JambaForCausalLM", LAYER | EXPERTS | _names("mamba")),
        sizes={
            "mamba_d_state": "ssm.state_size",
            "mamba_d_conv": "ssm.conv_kernel",
            "mamba_dt_rank": "ssm.time_step_rank",
        },
        derived=_jamba, zeros_are_none=True, arranged=arranged_states,
    ),
}  # fmt: skip
