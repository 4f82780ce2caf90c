"""Weights of a byte each that no product of a CPU knows, as plain ones in bf16: fp8, and more than 4 bits in groups of
16 inputs (GGUF's Q6_K).

They would be made into numbers anew for each product, which takes ten times as long as reading those; plain ones are at
most twice as large. What rounds its inputs rounds them here, too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from app.kernels.gemm import PackedWeight, pack_weight
from app.kernels.gemm.fp8 import Fp8Weight, rounded_rows
from app.kernels.gemm.fp8_block import Fp8BlockWeight, Fp8OnlyWeight, rounded_groups
from app.kernels.gemm.group import GroupWeight, of_inputs
from app.kernels.gemm.stored import bits_of
from app.kernels.gemm.tiled import TiledWeight, parts

Rounded = Callable[[torch.Tensor], torch.Tensor]  # x [T, K] -> what is left of it once it was quantized


@dataclass(slots=True, frozen=True)
class RoundedInputs(PackedWeight):
    """A weight whose inputs are quantized before."""

    weight: PackedWeight
    rounded: Rounded

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """x [T, K], quantized -> x W^T + bias, [T, N], in the dtype of x."""
        return self.weight.linear(self.rounded(x), bias)


def pack(weight: PackedWeight, dtype: torch.dtype) -> PackedWeight | None:
    """Weights with codes of 8 bits, where two bytes hold a number; see tiled.PackStored."""
    if dtype != torch.bfloat16:
        return None
    match weight:
        case GroupWeight() if bits_of(weight.tiles.form) == 8:
            return _plain(weight, dtype)
        case Fp8OnlyWeight():
            return _plain(weight, dtype)
        case Fp8Weight():
            return _plain(weight, dtype, partial(rounded_rows, input_scale=weight.input_scale, most=weight.most))
        case Fp8BlockWeight():
            return _plain(weight, dtype, partial(rounded_groups, group=weight.tiles.group))
        case _:
            return None


def _plain(
    weight: GroupWeight | Fp8OnlyWeight | Fp8Weight | Fp8BlockWeight,
    dtype: torch.dtype,
    rounded: Rounded | None = None,
) -> PackedWeight | None:
    packed = pack_weight(_numbers(weight, dtype))
    return packed if packed is None or rounded is None else RoundedInputs(packed, rounded)


def _numbers(weight: TiledWeight, dtype: torch.dtype) -> torch.Tensor:
    """The weight in `dtype`, some rows at a time: all of it in fp32 would be twice as large."""
    made = torch.empty(weight.shape, dtype=dtype)
    for start, stop in parts(weight.stored):
        made[start:stop] = weight.stored.dequantize(start, stop)
    return of_inputs(made, weight.order if isinstance(weight, GroupWeight) else None)
