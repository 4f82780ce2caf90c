"""Experts' weights of few bits that grouped products read as they are stored."""

from __future__ import annotations

import torch

from app.kernels.gemm.fp8_block import Fp8BlockWeight
from app.kernels.gemm.group import GroupWeight
from app.kernels.gemm.stored import BLOCK, StoredTiles
from app.kernels.gemm.tiled import TiledWeight
from app.kernels.moe import PackedExperts
from app.kernels.moe.stacked import StackedExperts


def stored_tiles(weight: torch.Tensor | PackedExperts) -> StoredTiles | None:
    """All experts' codes and scales, each tensor with a leading dimension of experts; None where no kernel reads them:
    other forms, groups of odd sizes, inputs in an order of the expert's own."""
    packed = weight.packed if isinstance(weight, StackedExperts) else None
    if not isinstance(packed, TiledWeight) or (isinstance(packed, GroupWeight) and packed.order is not None):
        return None
    return None if packed.stored.scales_of_block is None else packed.stored


def fp8_tiles(weight: torch.Tensor | PackedExperts) -> StoredTiles | None:
    """The same of experts that multiply activations which are rounded as they are: e4m3, each block of 128 x 128 with
    a scale, and no part of a block. None of others."""
    packed = weight.packed if isinstance(weight, StackedExperts) else None
    if not isinstance(packed, Fp8BlockWeight):
        return None
    tiles = packed.stored
    is_square = tiles.block == tiles.group == tiles.scale_rows == BLOCK
    return tiles if is_square and tiles.size % BLOCK == 0 and tiles.words.shape[1] % BLOCK == 0 else None


def serves(weight: PackedExperts) -> bool:
    """True if they are multiplied without being dequantized when they are loaded."""
    return stored_tiles(weight) is not None
