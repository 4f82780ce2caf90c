"""A whole step of one token through latent attention and experts in plain PyTorch: the truth."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from app.kernels.whole_step import StepToken
from app.kernels.whole_step.latents import LatentLayer, LatentShape


def latent_step(x: torch.Tensor, layers: Sequence[LatentLayer], token: StepToken, shape: LatentShape) -> torch.Tensor:
    """x [1, hidden] -> [1, hidden], computed in fp32, and rounded where a layer's parts meet."""
    for layer in layers:
        x = x + _attended(_normed(x, layer.norm, shape.eps), layer, token, shape) @ layer.output.t()
        x = x + _of_experts(_normed(x, layer.mlp_norm, shape.eps), layer, shape)
    return x


def _normed(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return F.rms_norm(x.float(), x.shape[-1:], weight.float(), eps).to(x.dtype)


def _turned(x: torch.Tensor, token: StepToken) -> torch.Tensor:
    """[.., rope], whose pairs lie together, as it is with the first of each before the second."""
    first, second = x[..., ::2].float(), x[..., 1::2].float()
    cos, sin = token.cos.float().flatten(), token.sin.float().flatten()
    return (torch.cat((first, second), -1) * cos + torch.cat((second, first), -1) * sin).to(x.dtype)


def _attended(x: torch.Tensor, layer: LatentLayer, token: StepToken, shape: LatentShape) -> torch.Tensor:
    """Attends with keys and values as the latents make them: what the heads give, [1, heads value]."""
    s, cache = shape, layer.cache
    query, latent, turning = torch.split(
        (x @ layer.inputs.t()).flatten(), [s.heads * (s.nope + s.rope), s.rank, s.rope]
    )
    query = query.view(s.heads, -1)
    new = torch.cat((_normed(latent, layer.latent_norm, s.latent_eps), _turned(turning, token)))
    size, slot, length = cache.shape[1], int(token.slot), int(token.seq_len)
    if slot >= 0:
        cache[slot // size, slot % size] = new
    blocks = token.blocks.flatten()[: -(-length // size)].long()
    kept = torch.cat((cache[blocks].flatten(0, 1)[: length - 1], new[None])).float()
    keys, values = torch.split(kept[:, : s.rank] @ layer.up.float().transpose(1, 2), [s.nope, s.value], -1)
    asked = torch.cat((query[:, : s.nope], _turned(query[:, s.nope :], token)), -1).float()
    scores = torch.einsum("hd,hnd->hn", asked[:, : s.nope], keys) + asked[:, s.nope :] @ kept[:, s.rank :].t()
    found = torch.einsum("hn,hnv->hv", (scores * s.scale).softmax(-1), values)
    return found.to(x.dtype).view(1, -1)


def _of_experts(x: torch.Tensor, layer: LatentLayer, shape: LatentShape) -> torch.Tensor:
    s = shape
    scores = (x.float() @ layer.router.float().t()).flatten()
    chosen: list[int] = scores.sort(descending=True, stable=True).indices[: s.chosen].tolist()
    weights = {expert: float(scores.softmax(0)[expert]) for expert in chosen}
    total = torch.zeros_like(x, dtype=torch.float32)
    for expert, weight in {**weights, **{s.experts + i: 1.0 for i in range(s.shared)}}.items():
        gate, up = (x @ layer.gate_up[expert].t()).float().chunk(2, dim=-1)
        total += ((F.silu(gate) * up * weight).to(x.dtype) @ layer.down[expert].t()).float()
    return total.to(x.dtype)
