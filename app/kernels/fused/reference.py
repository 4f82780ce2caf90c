"""The fused functions in plain PyTorch: the truth, and the CPU path."""

from __future__ import annotations

import functools
import math

import torch
import torch.nn.functional as F

from app.kernels.attention import HeadNorm
from app.kernels.attention.reference import quantize, write_kv
from app.kernels.fused import FusedOps, GatedActivation, LatentRotation
from app.kernels.fused.composed import Composed

_LEAST_SQUARE = 1e-38  # so that its root can be divided by in fp32, too


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / rms(x) * weight over the last dimension; a weight in fp32 is multiplied before the one rounding."""
    if weight.dtype == x.dtype:
        if x.numel() == weight.numel() and x.device.type == "cpu":
            return _norm_of_one(x, weight, eps)
        return F.rms_norm(x, weight.shape, weight, eps)
    return F.rms_norm(x.float(), weight.shape, weight, eps).to(x.dtype)


def _norm_of_one(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """The norm of a vector: its length as a number, then one operation that rounds once. F.rms_norm makes ten."""
    length = torch.linalg.vector_norm(x, dtype=torch.float32).item()
    factor = 1.0 / math.sqrt(max(length * length / weight.numel() + eps, _LEAST_SQUARE))
    return torch.addcmul(_zero(x.dtype), x, weight, value=factor)


@functools.cache
def _zero(dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(1, dtype=dtype)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the first Dr dimensions of x [T, H, D] by cos and sin [T, 1, Dr]."""
    rotary_dim = cos.shape[-1]
    if rotary_dim < x.shape[-1]:
        return torch.cat((rotate(x[..., :rotary_dim], cos, sin), x[..., rotary_dim:]), dim=-1)
    return torch.addcmul(x * cos, x.roll(rotary_dim // 2, dims=-1), sin)


_COMPOSED = Composed(rms_norm, rotate)
add_rms_norm = _COMPOSED.add_rms_norm


def rotate_and_write(
    heads: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    norm: HeadNorm | None,
    kv_cache: torch.Tensor,
    slots: torch.Tensor,
    kv_scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """heads [T, Hq + 2 Hkv, D] -> rotated queries [T, Hq, D]; keys and values go into the cache."""
    num_kv_heads = kv_cache.shape[2]
    num_heads = heads.shape[1] - 2 * num_kv_heads
    query, key = heads[:, :num_heads], heads[:, num_heads : num_heads + num_kv_heads]
    value = heads[:, num_heads + num_kv_heads :]
    if norm is None:
        # Queries and keys lie side by side: one rotation serves both.
        rotated = rotate(heads[:, : num_heads + num_kv_heads], cos, sin)
        query, key = rotated[:, :num_heads], rotated[:, num_heads:]
    else:
        query = rotate(rms_norm(query, norm.query_weight, norm.eps), cos, sin)
        key = rotate(rms_norm(key, norm.key_weight, norm.eps), cos, sin)
    write_kv(key, value, kv_cache, slots, kv_scales)
    return query


def rotate_and_write_latent(
    query: torch.Tensor,
    latent: torch.Tensor,
    rotation: LatentRotation,
    cache: torch.Tensor,
    slots: torch.Tensor,
    scale: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """query [T, H, Dr] is rotated into out; latents [T, R + Dr], normed and rotated, go into the cache."""
    size = len(rotation.norm_weight)
    normed = rms_norm(latent[:, :size], rotation.norm_weight, rotation.eps)
    heads = torch.cat((query, latent[:, None, size:]), dim=1)
    if rotation.interleaved:
        heads = torch.cat((heads[..., 0::2], heads[..., 1::2]), dim=-1)
    heads = rotate(heads, rotation.cos, rotation.sin)
    out.copy_(heads[:, :-1])
    row = torch.cat((normed, heads[:, -1]), dim=-1)
    kept = slots >= 0
    if scale is not None:  # as bytes: PyTorch lacks indexing of fp8 on some devices
        row, cache = quantize(row[:, None], scale)[:, 0].view(torch.uint8), cache.view(torch.uint8)
    blocks, offsets = slots[kept] // cache.shape[1], slots[kept] % cache.shape[1]
    cache[blocks, offsets] = row[kept]


def activate(x: torch.Tensor, activation: GatedActivation) -> torch.Tensor:
    """The activation of every number."""
    if activation == "silu":
        return F.silu(x)
    return F.gelu(x, approximate="tanh" if activation == "gelu_tanh" else "none")


def act_and_mul(gate_up: torch.Tensor, activation: GatedActivation) -> torch.Tensor:
    """activation(gate) * up, with gate and up side by side: [T, 2 I] -> [T, I]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return activate(gate, activation).mul_(up)


OPS = FusedOps(
    add_rms_norm=add_rms_norm,
    rotate_and_write=rotate_and_write,
    rotate_heads=_COMPOSED.rotate_heads,
    rotate_and_write_latent=rotate_and_write_latent,
    act_and_mul=act_and_mul,
    rms_norm=rms_norm,
)
