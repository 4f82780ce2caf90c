"""Tiles of the products of few rows on a GPU (triton_small.py): of which sizes, and where a library is as fast.

The table was read off `python -m benchmarks.small_linear`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from app.kernels.gemm import Activations, DeferredNorm
from app.kernels.gemm.triton_held import HeldTile, held_tile
from app.kernels.launch import cdiv

MOST_ROWS = 64  # beyond, cuBLAS is as fast
_DTYPES = (torch.bfloat16, torch.float16)
MOST_GATED_ROWS = 128  # for a large gate and up, whose activation is fused
_LEAST_GATED_SIZE = 4096  # inputs of it; with fewer cuBLAS and a launch for the activation are faster
_PROGRAMS = 256  # about two for each multiprocessor
_MOST_SPLITS = 8
_LEAST_SHARE = 384  # of K, for a split
LEAST_DEPTH = 64  # a tile's, of K
FEW_COLUMNS = 64


@dataclass(slots=True, frozen=True)
class SmallTile:
    """Tile sizes and launch options of the kernels."""

    columns: int
    depth: int
    num_warps: int
    num_stages: int
    splits: int = 1  # parts that K is cut into


def whole_tile(num_rows: int, columns: int, size: int) -> SmallTile | None:
    """The tile for plain rows: only where there are enough columns for all multiprocessors, as in a head."""
    if columns < 32 * _PROGRAMS:
        return None
    return _fitting(SmallTile(64, 128 if num_rows <= 32 else 64, 4, 3), size)


def deferred_tile(num_rows: int, columns: int, size: int) -> SmallTile | None:
    """The tile for rows with a deferred norm."""
    tile = SmallTile(64 if size >= 2048 else 32, 128, 4, 5)
    if columns <= FEW_COLUMNS:  # of few programs, each of which has all it reads on its way at once
        tile = SmallTile(16, 512, 4, 4)
    return whole_tile(num_rows, columns, size) or _cut_to_fit(tile, size)


def split_tile(num_rows: int, columns: int, size: int) -> SmallTile | None:
    """The tile for a product that is added to the residual; None: cuBLAS, then the norm."""
    if columns >= 2048:
        tile, most = (SmallTile(32, 128, 4, 5), 320) if num_rows <= 32 else (SmallTile(64, 128, 4, 5), 128)
    else:
        tile, most = (SmallTile(32, 64, 4, 5), 256) if num_rows <= 16 else (SmallTile(16, 128, 4, 5), 128)
    tiles, splits = cdiv(columns, tile.columns), 1
    while splits < _MOST_SPLITS and 2 * splits * tiles <= most and size >= 2 * splits * _LEAST_SHARE:
        if size % (2 * splits * tile.depth):
            break
        splits *= 2
    if splits * tiles > _PROGRAMS:  # three on a multiprocessor have no room for more stages
        tile = replace(tile, num_stages=4)
    return _fitting(replace(tile, splits=splits), size)


def gated_tile(num_rows: int, columns: int, size: int, *, is_deferred: bool = False) -> SmallTile | None:
    """The tile for gate and up with their activation."""
    if columns < 8192:
        if 16 < num_rows <= 32:
            return _cut_to_fit(SmallTile(32, 64, 4, 5), size) if is_deferred else None
        return _cut_to_fit(SmallTile(32, 128, 4, 5), size)
    if num_rows > MOST_ROWS:
        return _cut_to_fit(SmallTile(128, 64, 8, 4), size)
    is_deep = num_rows <= 32 and columns <= 64 * _PROGRAMS
    return _cut_to_fit(SmallTile(64, 128 if is_deep else 64, 4, 3), size)


def may_defer_norm(size: int, dtype: torch.dtype, depth: int = 128) -> bool:
    """True if a norm of so many columns is left to the products that read it, whose tiles are `depth` deep. fp16 might
    not hold what is not divided yet."""
    return dtype == torch.bfloat16 and size % depth == 0


def _fitting(tile: SmallTile, size: int) -> SmallTile | None:
    return None if size % (tile.depth * tile.splits) else tile


def _cut_to_fit(tile: SmallTile, size: int) -> SmallTile | None:
    """The tile, with more and smaller stages where only these divide K: whoever reads a deferred norm must divide."""
    if size % tile.depth and tile.depth > LEAST_DEPTH:
        tile = replace(tile, depth=LEAST_DEPTH, num_stages=2 * tile.num_stages - 2)
    return _fitting(tile, size)


def _rows(x: Activations) -> torch.Tensor:
    return x.rows if isinstance(x, DeferredNorm) else x


def _serves(x: torch.Tensor, weight: torch.Tensor, most_rows: int) -> bool:
    return x.shape[0] <= most_rows and x.dtype in _DTYPES and weight.is_contiguous() and x.stride(1) == 1


def plain_tile(x: Activations, weight: torch.Tensor) -> SmallTile | None:
    """The tile of `linear`; None: cuBLAS."""
    rows, tile_of = _rows(x), deferred_tile if isinstance(x, DeferredNorm) else whole_tile
    return tile_of(rows.shape[0], *weight.shape) if _serves(rows, weight, MOST_ROWS) else None


def activated_tile(x: Activations, weight: torch.Tensor) -> SmallTile | None:
    """The tile of `gated_linear`; None: cuBLAS, then the activation."""
    rows, columns, size = _rows(x), weight.shape[0] // 2, weight.shape[1]
    is_large = columns >= 8192 and size >= _LEAST_GATED_SIZE
    if not _serves(rows, weight, MOST_GATED_ROWS if is_large else MOST_ROWS):
        return None
    return gated_tile(rows.shape[0], columns, size, is_deferred=isinstance(x, DeferredNorm))


def added_tile(x: torch.Tensor, weight: torch.Tensor) -> SmallTile | None:
    """The tile of `linear_add_norm`; None: cuBLAS, then sum and norm."""
    return split_tile(x.shape[0], *weight.shape) if _serves(x, weight, MOST_ROWS) else None


def tile_to_hold(x: torch.Tensor, weight: torch.Tensor) -> HeldTile | None:
    """The tile of a product whose weight comes before its rows do; None: another kernel's."""
    return held_tile(x.shape[0], *weight.shape) if _serves(x, weight, MOST_ROWS) else None


def stages_within(num_bytes: int, tile: SmallTile, height: int, num_weights: int, itemsize: int) -> int:
    """The tile's stages, or as many as shared memory holds: each buffers a tile of x and of each weight."""
    each = (height + num_weights * tile.columns) * tile.depth * itemsize
    return max(1, min(tile.num_stages, num_bytes // each))
