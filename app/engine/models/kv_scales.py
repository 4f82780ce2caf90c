"""Scales of a quantized KV cache in a checkpoint: found under the names that are in use, given to their layers.

A calibrated checkpoint holds one number, or one for each KV head, beside every layer's projections: `k_scale` and
`v_scale` of `self_attn`, of `self_attn.attn` or of the projections; older ones hold one `kv_scale` for both. A stored
number times its scale is the key or value.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Protocol, TypeVar

import torch
from torch import nn

from app.engine.layers.attention import Attention
from app.errors import CheckpointError

_NAME = re.compile(r"(.+\.self_attn)\.(?:attn\.|[kv]_proj\.|qkv_proj\.)?(k|v|kv|q|prob)_scale")
# Rows of Attention.kv_scales. Scales of queries and probabilities are for arithmetic in fp8, which there is none of.
_ROWS = {"kv": (0, 1), "k": (0,), "v": (1,), "q": (), "prob": ()}


class ScaleTensor(Protocol):
    """A tensor of a checkpoint that may be such a scale."""

    @property
    def name(self) -> str:
        """Its name there."""
        ...

    @property
    def file(self) -> object:
        """Where it comes from, for people."""
        ...

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        ...

    def whole(self) -> torch.Tensor:
        """All of it."""
        ...


TensorT = TypeVar("TensorT", bound=ScaleTensor)


def take_kv_scales(model: nn.Module, tensors: Mapping[str, TensorT], names: Collection[str]) -> dict[str, TensorT]:
    """The tensors that are no such scales; the others go to their layers, or nowhere without a quantized cache.

    `names` are those of the whole model's tensors: a scale beside none of them is left among the rest.
    CheckpointError names a scale that is none.
    """
    layers = {name: module for name, module in model.named_modules() if isinstance(module, Attention)}
    found = find_kv_scales(tensors, names)
    for name in sorted(found, key=lambda name: list(_ROWS).index(found[name][2])):  # a common one first
        layer = layers.get(found[name][1])
        if layer is not None and layer.kv_scales is not None and _ROWS[found[name][2]]:
            layer.kv_scales[list(_ROWS[found[name][2]])] = _share(layer, tensors[name]).to(layer.kv_scales.device)
    return {name: tensor for name, tensor in tensors.items() if name not in found}


def find_kv_scales(tensors: Collection[str], names: Collection[str]) -> dict[str, re.Match[str]]:
    """Which of `tensors` are such scales, beside one of `names`."""
    return {
        name: match for name in tensors if (match := _NAME.fullmatch(name)) and f"{match[1]}.q_proj.weight" in names
    }


def _share(layer: Attention, tensor: ScaleTensor) -> torch.Tensor:
    """Scales of this rank's KV heads, fp32 [Hkv]."""
    scales = tensor.whole().float().flatten()
    qkv = layer.qkv_proj
    num_heads = qkv.whole_kv // layer.head_dim
    if len(scales) not in (1, num_heads):
        raise CheckpointError(
            f"{tensor.name} in {tensor.file} has shape {list(tensor.shape)}, not one number or one for each of "
            f"{num_heads} KV heads",
            param="model",
        )
    if not bool((scales.isfinite() & (scales > 0)).all()):
        raise CheckpointError(
            f"{tensor.name} in {tensor.file} is no scale: it must be above 0; kv_cache_dtype=auto does without",
            param="model",
        )
    share = qkv.shard("k_proj")[2]
    return scales.expand(num_heads)[share * layer.num_kv_heads :][: layer.num_kv_heads]
