"""What llama.cpp's converter makes of layers that keep states (conversion/qwen.py: Qwen3NextModel and the class that
reorders heads of values), as the numbers that it writes and the way back from them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from tests.gguf_kimi import kimi_sizes, kimi_tensors
from tests.gguf_mamba import MAMBA_TYPES, Restore, mamba_sizes, mamba_tensors

_NAMES = {
    **{"in_proj_qkv.weight": "attn_qkv.weight", "in_proj_z.weight": "attn_gate.weight", "A_log": "ssm_a"},
    **{"in_proj_a.weight": "ssm_alpha.weight", "in_proj_b.weight": "ssm_beta.weight", "dt_bias": "ssm_dt.bias"},
    **{"conv1d.weight": "ssm_conv1d.weight", "norm.weight": "ssm_norm.weight", "out_proj.weight": "ssm_out.weight"},
    "in_proj_ba.weight": "ssm_ba.weight",
}
_PLAIN = re.compile(r"blk\.\d+\.(ssm_(d|a|conv1d|conv1d_[qkv]|\w*norm)|shortconv|\w+norm)\b.*|.*\.bias")


def is_never_quantized(own: str) -> bool:
    """True of what the converter writes as F32 whatever type is asked for."""
    return _PLAIN.fullmatch(own) is not None


def state_tensors(
    name: str, parameter: torch.Tensor, config: Mapping[str, Any], architecture: str
) -> Iterator[tuple[str, torch.Tensor, Restore]]:
    """Name, numbers and way back of each tensor that a parameter of a layer with states becomes; none of any other."""
    if name.endswith(".conv.conv.weight"):
        kernel = parameter.squeeze(1)
        yield f"blk.{name.split('.')[2]}.shortconv.conv.weight", kernel, kernel.copy_
        return
    if config["model_type"] in MAMBA_TYPES:
        yield from mamba_tensors(name, parameter, config)
        return
    if config["model_type"] == "kimi_linear":
        yield from kimi_tensors(name, parameter)
        return
    layer, _, part = name.partition(".layers.")[2].partition(".linear_attn.")
    if not part:
        return
    keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    key_dim, value_dim = config["linear_key_head_dim"], config["linear_value_head_dim"]
    each = values // keys
    if part == "in_proj_qkvz.weight":  # of a key, side by side
        heads = parameter.view(keys, 2 * key_dim + 2 * each * value_dim, -1)
        q, k, v, z = heads.split([key_dim, key_dim, each * value_dim, each * value_dim], 1)
        yield _together(f"blk.{layer}.attn_qkv.weight", [q, k, v])
        yield _together(f"blk.{layer}.attn_gate.weight", [z])
        return
    own = f"blk.{layer}.{_NAMES[part]}"
    if architecture == "qwen3next" or keys == values:
        pieces = [parameter.squeeze()]
    elif part == "out_proj.weight":
        pieces = [_tiled(parameter, 1, keys, each)]
    elif part in ("in_proj_qkv.weight", "conv1d.weight"):
        first, rest = parameter.squeeze().split([2 * keys * key_dim, values * value_dim])
        pieces = [first, _tiled(rest, 0, keys, each)]
    else:
        pieces = [parameter if part == "norm.weight" else _tiled(parameter, 0, keys, each)]
    if part == "A_log":
        (logs,) = pieces
        yield own, -logs.flatten().exp(), lambda x: logs.copy_((-x).log().view(logs.shape))
    elif part == "out_proj.weight":
        (columns,) = pieces
        yield own, columns.flatten(1), lambda x: columns.copy_(x.view(columns.shape))
    else:
        yield _together(own, pieces)


def _tiled(x: torch.Tensor, axis: int, keys: int, each: int) -> torch.Tensor:
    """A view: of heads that lie beside those of the same key, one of each key after the other."""
    return x.unflatten(axis, (keys, each, -1)).transpose(axis, axis + 1)


def _together(own: str, pieces: list[torch.Tensor]) -> tuple[str, torch.Tensor, Restore]:
    """One tensor of views of rows, one behind the other."""
    is_vector = own.endswith((".bias", "norm.weight"))
    flat = [piece.flatten() if is_vector else piece.reshape(-1, piece.shape[-1]) for piece in pieces]

    def restore(x: torch.Tensor) -> None:
        for piece, part in zip(pieces, x.split([len(one) for one in flat]), strict=True):
            piece.copy_(part.reshape(piece.shape))

    return own, torch.cat(flat), restore


def state_sizes(config: Mapping[str, Any]) -> dict[str, Any]:
    """The keys that the converter adds for delta nets and short convolutions."""
    if "conv_L_cache" in config:
        kinds, heads = config["layer_types"], config["num_key_value_heads"]
        found = {
            "{arch}.shortconv.l_cache": config["conv_L_cache"],
            "{arch}.attention.head_count_kv": [heads if kind == "full_attention" else 0 for kind in kinds],
        }
        dense = {"{arch}.leading_dense_block_count": config.get("num_dense_layers"), "{arch}.expert_gating_func": 2}
        return found | (dense if "num_dense_layers" in config else {})
    if config["model_type"] in MAMBA_TYPES:
        return mamba_sizes(config)
    if config["model_type"] == "kimi_linear":
        return kimi_sizes(config)
    if "linear_num_key_heads" not in config:
        return {}
    rope = config.get("rope_parameters") or {}
    return {
        "{arch}.ssm.conv_kernel": config.get("linear_conv_kernel_dim", 4),
        "{arch}.ssm.state_size": config["linear_key_head_dim"],
        "{arch}.ssm.group_count": config["linear_num_key_heads"],
        "{arch}.ssm.time_step_rank": config["linear_num_value_heads"],
        "{arch}.ssm.inner_size": config["linear_value_head_dim"] * config["linear_num_value_heads"],
        "{arch}.full_attention_interval": 4,
        "{arch}.rope.dimension_count": int(config["head_dim"] * rope.get("partial_rotary_factor", 0.25)),
    }
