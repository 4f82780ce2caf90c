"""A whole step in plain PyTorch: the truth."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from app.kernels.fused.reference import rotate
from app.kernels.gemm.stored import StoredTiles
from app.kernels.moe import GLU
from app.kernels.moe.reference import glu
from app.kernels.whole_step import StepExperts, StepLayer, StepShape, StepToken, StepWeight


def whole_step(x: torch.Tensor, layers: Sequence[StepLayer], token: StepToken, shape: StepShape) -> torch.Tensor:
    """x [rows, hidden] -> the same, row by row, computed in fp32, and rounded where a layer's parts meet."""
    return torch.cat([_row(x[row : row + 1], layers, _one_of(token, row), shape) for row in range(len(x))])


def _one_of(token: StepToken, row: int) -> StepToken:
    cos, sin, blocks = (part.view(-1, part.shape[-1])[row] for part in (token.cos, token.sin, token.blocks))
    more = tuple((slots[row], table.view(-1, table.shape[-1])[row]) for slots, table in token.more)
    return StepToken(cos, sin, token.slot[row], token.seq_len[row], blocks, more)


def _row(x: torch.Tensor, layers: Sequence[StepLayer], token: StepToken, shape: StepShape) -> torch.Tensor:
    for layer in layers:
        output, biases = _product(_attended(x, layer, token, shape), layer.output), layer.biases
        x = x + (output if biases is None else output + biases.output)
        normed = _normed(x, layer.mlp_norm, shape)
        if shape.experts is None:
            x = x + _product(glu(_product(normed, layer.gate_up).float(), GLU()).to(x.dtype), layer.down)
        else:
            x = x + _of_experts(normed, layer, shape.experts)
    return x


def _of_experts(x: torch.Tensor, layer: StepLayer, experts: StepExperts) -> torch.Tensor:
    assert layer.router is not None
    scores = x.float() @ layer.router.float().t()
    scores = scores if layer.biases is None else scores + layer.biases.router
    scores = scores.to(x.dtype).float().flatten()
    order: list[int] = scores.sort(descending=True, stable=True).indices.tolist()
    chosen = order[: experts.chosen]
    weights = scores[chosen].softmax(0) if experts.weighs_chosen else scores.softmax(0)[chosen]
    weights = weights.to(x.dtype).float() if experts.rounds_weights else weights
    total = torch.zeros_like(x, dtype=torch.float32)
    for weight, expert in zip(weights, chosen, strict=True):
        gate_up = _product(x, _one(layer.gate_up, expert)).float()
        gate_up = gate_up if layer.biases is None else gate_up + layer.biases.gate_up[expert]
        given = (glu(gate_up, experts.activation) * weight).to(x.dtype)
        total += _product(given, _one(layer.down, expert)).float()
        total += 0.0 if layer.biases is None else weight * layer.biases.down[expert]
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
    qkv = _product(_normed(x, layer.norm, s), layer.qkv)
    heads = (qkv if layer.biases is None else qkv + layer.biases.qkv).view(-1, s.head_dim)
    query, key, value = torch.split(heads, [s.heads, s.kv_heads, s.kv_heads])
    if layer.query_norm is not None and layer.key_norm is not None:
        query, key = _normed(query, layer.query_norm, s), _normed(key, layer.key_norm, s)
    cos, sin = token.cos.view(1, -1), token.sin.view(1, -1)
    query, key = rotate(query, cos, sin), rotate(key, cos, sin)
    size = layer.cache.shape[3]
    slots, table = ((token.slot, token.blocks), *token.more)[layer.group]
    slot, length = int(slots), int(token.seq_len)
    if slot >= 0:
        layer.cache[slot // size, 0, :, slot % size] = key
        layer.cache[slot // size, 1, :, slot % size] = value
    blocks = table.flatten()[: -(-length // size)].long()
    kept = layer.cache[blocks].permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, : length - 1].float()
    keys = torch.cat((kept[0], key.float().unsqueeze(1)), 1)
    values = torch.cat((kept[1], value.float().unsqueeze(1)), 1)
    asked = query.float().view(s.kv_heads, -1, s.head_dim)
    scores = asked @ keys.transpose(1, 2) * s.scale
    if layer.window is not None:
        scores[:, :, : max(length - layer.window, 0)] = -torch.inf
    if layer.sinks is not None:
        scores = torch.cat((scores, layer.sinks.view(s.kv_heads, -1, 1)), -1)
    seen = values.masked_fill(scores[:, 0, :length, None].isinf(), 0.0)  # freed blocks may hold NaN
    return (scores.softmax(-1)[:, :, :length] @ seen).to(x.dtype).view(1, -1)
