"""Weights in 8 bits, rounded while loading, with a scale for each output channel; activations stay as they are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import torch
import torch.nn.functional as F

from app.kernels.gemm import PackedWeight
from app.quantization.base import QuantMethod


@dataclass(slots=True, frozen=True)
class Int8Weight(PackedWeight):
    """A weight [N, K]."""

    stored: torch.Tensor  # int8 [N, K]
    scale: torch.Tensor  # [N], in the weight's type

    @classmethod
    def of(cls, weight: torch.Tensor) -> Self:
        """Round to the nearest multiple of the channel's largest value / 127."""
        scale = weight.abs().amax(1).float().clamp_min(1e-12) / 127
        return cls((weight.float() / scale[:, None]).round().to(torch.int8), scale.to(weight.dtype))

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """See PackedWeight."""
        product = F.linear(x, self.stored.to(x.dtype)) * self.scale
        return product if bias is None else product + bias


class Int8Method(QuantMethod):
    """Any device and floating type."""

    def pack(self, stored: Mapping[str, torch.Tensor]) -> PackedWeight | None:
        """See QuantMethod."""
        return Int8Weight.of(stored["weight"])

    @classmethod
    def while_loading(cls) -> QuantMethod:
        """One object serves all layers."""
        return cls()
