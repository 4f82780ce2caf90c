"""Fused elementwise kernels of a decoder layer: the contract that every device keeps.

On a GPU a layer is a handful of large products and attention, and what lies between them is bound by launches in a
small batch and by memory in a large one; each function here is one launch that reads and writes every value once.
Arithmetic is in fp32 and each result is rounded once. Nothing depends on a value on the device or waits for it, so all
of it can be captured in a CUDA graph. `reference.py` is the plain PyTorch truth and the CPU path.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from app.registry import Registry


@dataclass(slots=True, frozen=True)
class HeadNorm:
    """RMS norms of single query and key heads, before they are rotated."""

    query_weight: torch.Tensor  # [D]
    key_weight: torch.Tensor  # [D]
    eps: float


@dataclass(slots=True, frozen=True)
class FusedOps:
    """One device's functions."""

    # (x [T, C], residual [T, C], weight [C], eps) -> (rms_norm(s) * weight, s), where s = x + residual
    add_rms_norm: Callable[
        [torch.Tensor, torch.Tensor, torch.Tensor, float],
        tuple[torch.Tensor, torch.Tensor],
    ]
    # (heads [T, Hq + 2 Hkv, D], cos [T, 1, Dr], sin [T, 1, Dr], norm, kv_cache [B, 2, Hkv, S, D], slots int64 [T],
    # kv_scales) -> queries [T, Hq, D]. `heads` holds a token's queries, keys and values side by side. Queries and keys
    # are normalised (norm None: not), then their first Dr dimensions are rotated: x * cos + roll(x, Dr / 2) * sin, so
    # the first half of sin is negated. Keys and values go into the cache at the tokens' slots; a slot of -1 stores
    # nothing. A quantized cache comes with kv_scales fp32 [2, Hkv] (see app/kernels/attention), another with None.
    rotate_and_write: Callable[
        [torch.Tensor, torch.Tensor, torch.Tensor, HeadNorm | None, torch.Tensor, torch.Tensor, torch.Tensor | None],
        torch.Tensor,
    ]
    # gate and up side by side [T, 2 I] -> silu(gate) * up [T, I]
    silu_and_mul: Callable[[torch.Tensor], torch.Tensor]


FUSED_OPS: Registry[FusedOps] = Registry(
    "device for fused kernels",
    {
        "cpu": "app.kernels.fused.reference:OPS",
        "cuda": "app.kernels.fused.triton_ops:OPS",
    },
)


def fused_ops(device: torch.device) -> FusedOps:
    """The functions of a device; a device without its own (meta, where a model is born) gets the CPU's."""
    return FUSED_OPS.load(device.type if device.type in FUSED_OPS else "cpu")
