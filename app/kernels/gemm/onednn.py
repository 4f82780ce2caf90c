"""Weights in the order that oneDNN's products want, so that no call has to reorder or stride through them (CPU).

The two operators are private to PyTorch: they are tried out on a small product before anyone relies on them.
Measured in fp32 on one core against F.linear: 1.2-1.9x at 1 row, 1.5-2.7x at 8, 1.1-1.6x at 64 and above, for weights
of 300 k to 25 M elements.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from app.kernels.gemm import PackedWeight
from app.kernels.gemm.reference import linear

# The order depends on the number of rows it is meant for, but hardly: orders for 8 and for 512 rows are equally fast
# at any number of rows; one for a single row is slower beyond it.
_PACKED_FOR_ROWS = 8
_DTYPES = (torch.float32, torch.bfloat16)


@dataclass(slots=True, frozen=True)
class OneDNNWeight(PackedWeight):
    """A weight in oneDNN's own order, an opaque tensor."""

    packed: torch.Tensor

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """[T, K] -> [T, N]."""
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self.packed, bias, "none", [], "")
        return out


def pack(weight: torch.Tensor) -> OneDNNWeight | None:
    """A reordered copy of weight [N, K] in fp32 or bf16; see gemm.Pack."""
    return _reordered(weight) if weight.dtype in _DTYPES and works(weight.dtype) else None


def _reordered(weight: torch.Tensor) -> OneDNNWeight:
    return OneDNNWeight(torch.ops.mkldnn._reorder_linear_weight(weight, _PACKED_FOR_ROWS))


@functools.cache
def works(dtype: torch.dtype) -> bool:
    """True if this build of PyTorch has the operators and they compute what F.linear computes."""
    weight = torch.linspace(-1.0, 1.0, 48 * 32).view(48, 32).to(dtype)
    bias = torch.linspace(-1.0, 1.0, 48).to(dtype)
    try:
        packed = _reordered(weight)
        for num_rows in (1, 5):
            x = torch.linspace(0.5, -1.0, num_rows * 32).view(num_rows, 32).to(dtype)
            # Not torch.testing: its first use imports torch.distributed.tensor, more than half a second.
            if not torch.allclose(packed.linear(x, bias), linear(x, weight, bias), rtol=2e-2, atol=2e-2):
                return False
    except (AttributeError, RuntimeError, TypeError, NotImplementedError):
        return False
    return True
