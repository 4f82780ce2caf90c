"""Tensors of layers with states in transformers' shapes: llama.cpp's converter writes -exp(A_log), drops the middle of
a convolution's sizes, and has vectors as columns, or by groups."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

from app.checkpoints.gguf.header import GgufHeader

Place = dict[str, Any]
_KERNELS = ("conv1d.weight", ".conv.conv.weight")  # and q_conv1d, k_conv1d, v_conv1d
_VECTORS = (".D", "norm.weight")


def arranged_states(places: Mapping[str, Place], config: Mapping[str, Any]) -> dict[str, Place]:
    """All places, those of states' parts as transformers has them."""
    return {name: _arranged(name, place) for name, place in places.items()}


def _arranged(name: str, place: Place) -> Place:
    shape = place["shape"]
    if name.endswith(".A_log"):  # one number a head, or some of each channel
        return {**place, "shape": shape if shape[-1] > 1 and len(shape) == 2 else [prod(shape)], "logs": True}
    if name.endswith(_KERNELS):
        return {**place, "shape": [prod(shape[:-1]), 1, shape[-1]]}
    return {**place, "shape": [prod(shape)]} if name.endswith(_VECTORS) else place


def has(header: GgufHeader, end: str) -> bool:
    """True if the name of a tensor ends so."""
    return any(name.endswith(end) for name in header.tensors)
