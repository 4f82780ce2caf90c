"""Linear layers: the contract that every kernel keeps, and which kernel serves a weight.

`LinearOps` are a device's products with weights as they were loaded; those of `reference.py` are the truth. A kernel
that wants a weight in its own order turns a weight [N, K] once, when it is loaded, into a `PackedWeight` that
multiplies any number of rows; whoever packs then drops the weight, so that no second copy stays in memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from app.registry import Registry

# A smaller weight stays in the caches, where the plain product is as fast and costs less to call.
LEAST_PACKED_ELEMENTS = 1 << 18


Product = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]


@dataclass(slots=True, frozen=True)
class LinearOps:
    """One device's products of x [T, K] with a weight [N, K] and a bias [N] or None, in the dtype of x."""

    linear: Product  # [T, N]
    linear_parts: Product  # the same, or fp32 [P, T, N] that `fused.add_rms_norm` adds up
    gated_linear: Product  # gate and up side by side: silu(first half) * second half, [T, N / 2]


LINEAR_OPS: Registry[LinearOps] = Registry(
    "device for linear layers",
    {
        "cpu": "app.kernels.gemm.reference:OPS",
        "cuda": "app.kernels.gemm.triton_small:OPS",
    },
)


def linear_ops(device: torch.device) -> LinearOps:
    """The products of a device; a device without its own (meta, where a model is born) gets the CPU's."""
    return LINEAR_OPS.load(device.type if device.type in LINEAR_OPS else "cpu")


class PackedWeight(Protocol):
    """A weight in a kernel's own order."""

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """x [T, K] -> x W^T + bias, [T, N], in the dtype of x."""
        ...


class GemmKernel(Protocol):
    """One way to multiply by packed weights."""

    def serves(self, dtype: torch.dtype, device: torch.device) -> bool:
        """Whether it works here; may try it out."""
        ...

    def pack(self, weight: torch.Tensor) -> PackedWeight:
        """weight [N, K], which is left as it is."""
        ...


GEMM_KERNELS: Registry[GemmKernel] = Registry("gemm kernel", {"onednn": "app.kernels.gemm.onednn:KERNEL"})


def pack_weight(weight: torch.Tensor) -> PackedWeight | None:
    """weight [N, K] packed by a kernel that beats the plain product on it; None where there is none."""
    if weight.numel() < LEAST_PACKED_ELEMENTS:
        return None
    kernels = (GEMM_KERNELS.load(name) for name in GEMM_KERNELS)
    return next((kernel.pack(weight) for kernel in kernels if kernel.serves(weight.dtype, weight.device)), None)
