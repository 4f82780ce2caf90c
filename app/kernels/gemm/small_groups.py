"""Weights of more than 4 bits whose groups no product of a CPU knows (GGUF's Q6_K: 16 inputs), as plain ones in bf16.

They would be made into numbers anew for each product, which takes ten times as long as reading those. Stored they
take more than a byte each, with their scales; so plain ones, of two, are less than twice as large.
"""

from __future__ import annotations

import torch

from app.kernels.gemm import PackedWeight, pack_weight
from app.kernels.gemm.group import GroupWeight
from app.kernels.gemm.stored import bits_of


def pack(weight: PackedWeight, dtype: torch.dtype) -> PackedWeight | None:
    """`GroupWeight` of codes of 8 bits, where two bytes hold a number; see tiled.PackStored."""
    if not isinstance(weight, GroupWeight) or bits_of(weight.tiles.form) != 8 or dtype != torch.bfloat16:
        return None
    return pack_weight(weight.dequantize().to(dtype))
