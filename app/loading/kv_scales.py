"""Scales of a quantized KV cache in a checkpoint: found under the names that are in use, given to their layers.

A calibrated checkpoint holds one number, or one for each KV head, beside every layer's projections: `k_scale` and
`v_scale` of `self_attn`, of `self_attn.attn` or of the projections, in Quark's `output_scale` of `k_proj` and `v_proj`;
older ones hold one `kv_scale` for both. A stored number times its scale is the key or value.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Protocol, TypeVar

import torch
from torch import nn

from app.errors import CheckpointError
from app.layers.attention_layer import AttentionLayer, KVScaleKind
from app.layers.weight import ShapeMismatch

_NAME = re.compile(
    r"(.+\.self_attn)\.(?:attn\.|[kv]_proj\.|qkv_proj\.)?(k|v|kv|q|prob)_(?:scale|(?:proj\.)?output_scale)"
)
# A common one first. Scales of queries and probabilities are for arithmetic in fp8, which there is none of.
_KINDS: dict[str, KVScaleKind | None] = {"kv": "kv", "k": "k", "v": "v", "q": None, "prob": None}


class ScaleTensor(Protocol):
    """A tensor of a checkpoint that may be such a scale."""

    @property
    def name(self) -> str:
        """Its name there."""
        ...

    @property
    def file(self) -> object:
        """Says where it comes from, for people."""
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
    layers = {name: module for name, module in model.named_modules() if isinstance(module, AttentionLayer)}
    layers |= {name.rpartition(".")[0]: layer for name, layer in layers.items()}  # that stand in another's module
    found = find_kv_scales(tensors, names)
    for name in sorted(found, key=lambda name: list(_KINDS).index(found[name][2])):
        layer, kind = layers.get(found[name][1]), _KINDS[found[name][2]]
        if layer is not None and layer.kv_scales is not None and kind is not None:
            _give(layer, kind, tensors[name])
    return {name: tensor for name, tensor in tensors.items() if name not in found}


def find_kv_scales(tensors: Collection[str], names: Collection[str]) -> dict[str, re.Match[str]]:
    """Finds which of `tensors` are such scales, beside tensors of the same attention layer among `names`."""
    layers = {name.rsplit(".", 2)[0] for name in names}
    return {name: match for name in tensors if (match := _NAME.fullmatch(name)) and match[1] in layers}


def _give(layer: AttentionLayer, kind: KVScaleKind, tensor: ScaleTensor) -> None:
    """CheckpointError names a tensor that is no scale of the layer."""
    scales = tensor.whole().float().flatten()
    if not bool((scales.isfinite() & (scales > 0)).all()):
        raise CheckpointError(
            f"{tensor.name} in {tensor.file} is no scale: it must be above 0; kv_cache_dtype=auto does without",
            param="model",
        )
    try:
        layer.set_kv_scales(kind, scales)
    except ShapeMismatch as error:
        raise CheckpointError(f"{tensor.name} in {tensor.file} {error}", param="model") from error
