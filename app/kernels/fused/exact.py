"""The fused functions for a CPU, made of operations whose results do not depend on the rows beside them
(`exact_math`)."""

from __future__ import annotations

from collections.abc import Callable

import torch

from app.errors import UnsupportedError
from app.kernels import exact_math
from app.kernels.attention import HeadNorm
from app.kernels.attention.reference import write_kv
from app.kernels.fused import FusedOps, GatedActivation, LatentRotation, PlainActivation
from app.kernels.fused.composed import Composed

rms_norm = exact_math.rms_norm
ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": exact_math.silu,
    "gelu": exact_math.gelu,
    "gelu_tanh": exact_math.gelu_tanh,
    "relu2": lambda x: x.relu().square(),
}


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the first Dr dimensions of x [T, H, D] by cos and sin [T, 1, Dr], in fp32 and rounded once."""
    rotary_dim = cos.shape[-1]
    if rotary_dim < x.shape[-1]:
        return torch.cat((rotate(x[..., :rotary_dim], cos, sin), x[..., rotary_dim:]), dim=-1)
    wide = x.float()
    turned = wide.roll(rotary_dim // 2, dims=-1).mul_(sin.float())  # a product of its own, never fused into the sum
    return wide.mul(cos.float()).add_(turned).to(x.dtype)


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
    query, key, value = torch.split(heads, [num_heads, num_kv_heads, num_kv_heads], dim=1)
    if norm is not None:
        query = rms_norm(query, norm.query_weight, norm.eps)
        key = rms_norm(key, norm.key_weight, norm.eps)
    write_kv(rotate(key, cos, sin), value, kv_cache, slots, kv_scales)
    return rotate(query, cos, sin)


def rotate_and_write_latent(
    query: torch.Tensor,
    latent: torch.Tensor,
    rotation: LatentRotation,
    cache: torch.Tensor,
    slots: torch.Tensor,
    scale: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """UnsupportedError: no exact attention reads latents."""
    raise UnsupportedError("deterministic: latent attention", param="deterministic")


def act_and_mul(gate_up: torch.Tensor, activation: GatedActivation) -> torch.Tensor:
    """activation(gate) * up, with gate and up side by side: [T, 2 I] -> [T, I]; rounded once each."""
    gate, up = gate_up.chunk(2, dim=-1)
    return activate(gate, activation).mul_(up)


def activate(x: torch.Tensor, activation: PlainActivation) -> torch.Tensor:
    """The activation of every number, rounded once."""
    return ACTIVATIONS[activation](x.float()).to(x.dtype)


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """That of every number, rounded once."""
    return exact_math.sigmoid(x.float()).to(x.dtype)


def tanh(x: torch.Tensor) -> torch.Tensor:
    """That of every number, rounded once."""
    return exact_math.tanh(x.float()).to(x.dtype)


OPS = FusedOps(
    add_rms_norm=add_rms_norm,
    rotate_and_write=rotate_and_write,
    rotate_heads=_COMPOSED.rotate_heads,
    rotate_and_write_latent=rotate_and_write_latent,
    act_and_mul=act_and_mul,
    rms_norm=rms_norm,
    sigmoid=sigmoid,
    times_sigmoid=lambda x, gate: x * sigmoid(gate),
    tanh=tanh,
    activate=activate,
)
