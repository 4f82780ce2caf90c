"""Weights side by side that are stored unlike: one product each."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from app.kernels.gemm import PackedWeight


@dataclass(slots=True, frozen=True)
class UnpackedWeight(PackedWeight):
    """A plain tensor [N, K] among packed ones."""

    weight: torch.Tensor

    @property
    def shape(self) -> torch.Size:
        """(N, K)."""
        return self.weight.shape

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """x [T, K] -> x W^T + bias, [T, N]."""
        return F.linear(x, self.weight, bias)

    def dequantize(self) -> torch.Tensor:
        """The weight in fp32."""
        return self.weight.float()


@dataclass(slots=True, frozen=True)
class PackedParts(PackedWeight):
    """A weight [N, K] of several, one below the other."""

    parts: tuple[PackedWeight, ...]
    sizes: tuple[int, ...]  # rows of each

    def even(self) -> PackedWeight:
        """See PackedWeight."""
        return replace(self, parts=tuple(part.even() for part in self.parts))

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """x [T, K] -> x W^T + bias, [T, N], in the dtype of x."""
        biases = [None] * len(self.parts) if bias is None else torch.split(bias, list(self.sizes))
        return torch.cat([part.linear(x, one) for part, one in zip(self.parts, biases, strict=True)], dim=-1)
