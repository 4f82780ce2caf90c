"""Linear layers: the contract that every kernel keeps, and which kernel serves a weight.

`reference.linear(x, weight, bias)` is the truth and what runs where nothing is faster. Another kernel turns a weight
[N, K] once, when it is loaded, into a `PackedWeight` that multiplies any number of rows; whoever packs then drops the
weight, so that no second copy stays in memory.
"""

from __future__ import annotations

from typing import Protocol

import torch

from app.registry import Registry

# A smaller weight stays in the caches, where the plain product is as fast and costs less to call.
LEAST_PACKED_ELEMENTS = 1 << 18


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
