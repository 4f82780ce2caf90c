"""Experts' weights of few bits that grouped products read as they are stored."""

from __future__ import annotations

import torch

from app.kernels.gemm.group import GroupWeight
from app.kernels.gemm.stored import StoredTiles
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


def serves(weight: PackedExperts) -> bool:
    """Whether they are multiplied without being dequantized when they are loaded."""
    return stored_tiles(weight) is not None
