"""Attention by a backend that norms, rotates, writes and attends at once, and by one that does not."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from app.kernels.attention.reference import OPS
from app.layers.attention import Attention


def attention(at_once: Any) -> Attention:
    """A layer whose projections pass on what they get."""
    layer = Attention.__new__(Attention)
    nn.Module.__init__(layer)
    layer.layer_index, layer.scale, layer.sliding_window, layer.soft_cap = 0, 0.5, None, None
    layer.kv_scales = layer.q_norm = layer.k_norm = layer.sinks = layer.slopes = layer.clip = layer.value_eps = None
    layer.num_heads, layer.num_kv_heads, layer.head_dim, layer.gates_output = 2, 1, 8, False
    layer.ops = replace(OPS, at_once=at_once)
    layer.qkv_proj = lambda x: x  # type: ignore[assignment]
    layer.o_proj = lambda x, epilogue: x  # type: ignore[assignment]
    layer.attend = lambda query, ctx: query + 1.0  # type: ignore[method-assign]
    layer.fused = SimpleNamespace(rotate_and_write=lambda heads, *_: heads[:, :2])  # type: ignore[assignment]
    return layer


def context(query_scale: torch.Tensor | None = None) -> Any:
    """A step of one token."""
    rotation = SimpleNamespace(cos=torch.ones(1, 1, 8), sin=torch.zeros(1, 1, 8), query_scale=query_scale)
    rotary = SimpleNamespace(of_step=lambda ctx: rotation)
    ctx = SimpleNamespace(kv_caches=[torch.zeros(1)], attention=[SimpleNamespace(slot_mapping=torch.zeros(1))])
    return rotary, ctx


def output(layer: Attention, query_scale: torch.Tensor | None = None) -> torch.Tensor:
    rotary, ctx = context(query_scale)
    layer.rotary = rotary
    return layer.forward(torch.zeros(1, 32), None, ctx)  # type: ignore[arg-type]


def test_a_backend_may_do_all_at_once() -> None:
    asked = []

    def at_once(heads: torch.Tensor, *given: Any) -> torch.Tensor:
        asked.append(given[-1])
        return torch.full((len(heads), 2, 8), 7.0)

    assert (output(attention(at_once)) == 7.0).all()
    assert asked[0].scale == 0.5
    assert (output(attention(lambda *_: None)) == 1.0).all()


def test_queries_that_are_scaled_behind_their_rotation_are_not_its_business() -> None:
    layer = attention(lambda heads, *_: torch.full((1, 2, 8), 7.0))
    assert (output(layer, torch.full((1, 1, 1), 2.0)) == 1.0).all()
