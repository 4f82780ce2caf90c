"""A whole step of one token in plain PyTorch: the truth."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from app.kernels.fused.reference import rotate
from app.kernels.gemm.stored import StoredTiles
from app.kernels.whole_step import StepExperts, StepLayer, StepShape, StepToken, StepWeight


def whole_step(x: torch.Tensor, layers: Sequence[StepLayer], token: StepToken, shape: StepShape) -> torch.Tensor:
    """x [1, hidden] -> [1, hidden], computed in fp32, and rounded where a layer's parts meet."""
    for layer in layers:
        x = x + _product(_attended(x, layer, token, shape), layer.output)
        normed = _normed(x, layer.mlp_norm, shape)
        if shape.experts is None:
            x = x + _product(_activated(normed, layer.gate_up).to(x.dtype), layer.down)
        else:
            x = x + _of_experts(normed, layer, shape.experts)
    return x


def _activated(x: torch.Tensor, gate_up: StepWeight) -> torch.Tensor:
    gate, up = _product(x, gate_up).float().chunk(2, dim=-1)
    return F.silu(gate) * up


def _of_experts(x: torch.Tensor, layer: StepLayer, experts: StepExperts) -> torch.Tensor:
    assert layer.router is not None
    scores = (x.float() @ layer.router.float().t()).to(x.dtype).float().flatten()
    order: list[int] = scores.sort(descending=True, stable=True).indices.tolist()
    chosen = order[: experts.chosen]
    weights = scores[chosen].softmax(0) if experts.weighs_chosen else scores.softmax(0)[chosen]
    weights = weights.to(x.dtype).float() if experts.rounds_weights else weights
    total = torch.zeros_like(x, dtype=torch.float32)
    for weight, expert in zip(weights, chosen, strict=True):
        given = (_activated(x, _one(layer.gate_up, expert)) * weight).to(x.dtype)
        total += _product(given, _one(layer.down, expert)).float()
    return total.to(x.dtype)


def _one(weight: StepWeight, expert: int) -> StepWeight:
    assert not isinstance(weight, StoredTiles)
    return weight[expert] if isinstance(weight, torch.Tensor) else weight.one(expert).stored


def _product(x: torch.Tensor, weight: StepWeight) -> torch.Tensor:
    """x W^T; in fp32 if the weight is stored."""
    if isinstance(weight, torch.Tensor):
        return x @ weight.t()
    assert isinstance(weight, StoredTiles)
    return (x.float() @ weight.dequantize().t()).to(x.dtype)


def _normed(x: torch.Tensor, weight: torch.Tensor, shape: StepShape) -> torch.Tensor:
    return F.rms_norm(x.float(), x.shape[-1:], weight.float(), shape.eps).to(x.dtype)


def _attended(x: torch.Tensor, layer: StepLayer, token: StepToken, shape: StepShape) -> torch.Tensor:
    s = shape
    heads = _product(_normed(x, layer.norm, s), layer.qkv).view(-1, s.head_dim)
    query, key, value = torch.split(heads, [s.heads, s.kv_heads, s.kv_heads])
    if layer.query_norm is not None and layer.key_norm is not None:
        query, key = _normed(query, layer.query_norm, s), _normed(key, layer.key_norm, s)
    cos, sin = token.cos.view(1, -1), token.sin.view(1, -1)
    query, key = rotate(query, cos, sin), rotate(key, cos, sin)
    size = layer.cache.shape[3]
    slot, length = int(token.slot), int(token.seq_len)
    if slot >= 0:
        layer.cache[slot // size, 0, :, slot % size] = key
        layer.cache[slot // size, 1, :, slot % size] = value
    blocks = token.blocks.flatten()[: -(-length // size)].long()
    kept = layer.cache[blocks].permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, : length - 1].float()
    keys = torch.cat((kept[0], key.float().unsqueeze(1)), 1)
    values = torch.cat((kept[1], value.float().unsqueeze(1)), 1)
    asked = query.float().view(s.kv_heads, -1, s.head_dim)
    return F.scaled_dot_product_attention(asked, keys, values, scale=s.scale).to(x.dtype).view(1, -1)
