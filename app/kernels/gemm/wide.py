"""Launches of `gluon_wide`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from app.kernels.fused import GatedActivation
from app.kernels.gemm import Activations, DeferredNorm
from app.kernels.gemm.gluon_wide import GROUPS, ROWS, wide_linear_kernel
from app.kernels.gemm.stored import StoredTiles
from app.kernels.gemm.triton_small import arrival_counters
from app.kernels.launch import cdiv, early_launch, multiprocessors, next_power_of_2

COLUMNS = GROUPS.value * ROWS.value  # rows of the weight in a tile


_FORMS = ("nibble", "int8", "e4m3")
_MOST_SPLITS = 4
_ALIGNED = 16  # bytes: the copy engine's
_FEW_ROWS = 32  # a decode step's, where weights with zero points are unpacked faster here
_LEAST_TILES = 64  # fewer leave half of the multiprocessors idle: a lower tile then
_SMALL = 64  # rows of x whose sums leave registers for two programs a multiprocessor


@dataclass(slots=True, frozen=True)
class WideTile:
    """Tile sizes and launch options of the kernel."""

    height: int = 256  # rows of x
    stages: int = 3
    splits: int = 1  # parts that K is cut into


def wide_tile(num_rows: int, weight: StoredTiles) -> WideTile | None:
    """The tile for so many rows, as measured (benchmarks/RESULTS.md); None: the kernel does not read such a weight, or
    another is as fast."""
    if not serves(weight):
        return None
    device = weight.words.device
    tiles_n = cdiv(weight.shape[0], COLUMNS)
    if num_rows <= _FEW_ROWS:
        pays = weight.offsets is not None and num_rows > _FEW_ROWS // 2 and tiles_n >= multiprocessors(device)
        return WideTile(_FEW_ROWS, 6) if pays else None
    if num_rows <= _SMALL:
        return None
    heights = (256, 128) if num_rows > 128 else (128,)
    height = next((height for height in heights if tiles_n * cdiv(num_rows, height) >= _LEAST_TILES), _SMALL)
    splits = max(1, min(_MOST_SPLITS, multiprocessors(device) // (tiles_n * cdiv(num_rows, height))))
    return WideTile(height, 3 if height == 256 else 4, splits)


def serves(weight: StoredTiles) -> bool:
    """True if the kernel reads such a weight."""
    return (
        weight.form in _FORMS
        and weight.scales.is_floating_point()
        and weight.scales_of_block is not None
        and weight.size % (_ALIGNED // 2) == 0
        and weight.run in (16, 32, 64)  # as wide as the ways to lay rows out in shared memory
    )


def _aligned(rows: torch.Tensor) -> torch.Tensor:
    """Rows as the copy engine takes them."""
    is_aligned = rows.data_ptr() % _ALIGNED == 0 and rows.stride(0) * rows.element_size() % _ALIGNED == 0
    return rows if is_aligned else rows.clone(memory_format=torch.contiguous_format)


def wide_linear(
    x: Activations,
    weight: StoredTiles,
    bias: torch.Tensor | None,
    tile: WideTile,
    *,
    activation: GatedActivation | None = None,
    residual: torch.Tensor | None = None,
    norm: tuple[torch.Tensor, float] | None = None,
) -> tuple[torch.Tensor, DeferredNorm | None]:
    """The same as `triton_packed_ops.packed_linear`."""
    rows, squares, eps = (x.rows, x.squares, x.eps) if isinstance(x, DeferredNorm) else (x, None, 0.0)
    rows = _aligned(rows)
    (num_rows, size), columns = rows.shape, weight.shape[0]
    tiles_n, tiles_m = cdiv(columns, COLUMNS), cdiv(num_rows, tile.height)
    num_blocks = cdiv(size, weight.block)
    splits = cdiv(num_blocks, cdiv(num_blocks, min(tile.splits, num_blocks)))  # none is empty
    out = torch.empty(num_rows, columns // 2 if activation else columns, dtype=rows.dtype, device=rows.device)
    deferred = None
    if norm is not None:
        new_squares = torch.empty(num_rows, tiles_n * GROUPS.value, dtype=torch.float32, device=rows.device)
        deferred = DeferredNorm(torch.empty_like(out), new_squares, norm[1])
    shares = arrived = None
    if splits > 1:
        shares = torch.empty(tiles_n * tiles_m * splits, COLUMNS, tile.height, device=rows.device)
        arrived = arrival_counters(rows.device)
    num_groups = weight.scales_of_block
    assert num_groups is not None, weight.group
    num_groups = max(1, num_groups)
    run = weight.run
    panels = gl.NVMMASharedLayout(swizzle_byte_width=2 * run, element_bitwidth=16, rank=2)
    box = 8 if activation else ROWS.value
    d_x = TensorDescriptor(rows, list(rows.shape), list(rows.stride()), [tile.height, run], panels)
    words = weight.words
    d_words = TensorDescriptor(words, list(words.shape), list(words.stride()), [box, run], panels)
    is_small = tile.height <= _SMALL
    num_squares = 1 if squares is None else squares.shape[1]
    wide_linear_kernel[tiles_m, tiles_n, splits](
        d_x=d_x, d_words=d_words, p_scales=weight.scales, p_offsets=weight.offsets, p_bias=bias, p_squares=squares,
        p_residual=residual, p_norm=norm[0] if norm else None, p_shares=shares, p_arrived=arrived, p_out=out,
        p_rows=deferred.rows if deferred else None, p_new_squares=deferred.squares if deferred else None,
        T=num_rows, N=columns, K=size, stride_residual=0 if residual is None else residual.stride(0),
        num_scales=weight.scales.shape[1], num_blocks=num_blocks, eps=eps, BM=tile.height, BK=weight.block,
        SPLITS=splits, STAGES=tile.stages, FORM=weight.form, G=num_groups,
        PER=0 if weight.group >= size else weight.group * num_groups // weight.block,
        ROWS_OF_SCALE=weight.scale_rows, GATED=activation is not None, ACT=activation or "silu", P=num_squares,
        BP=next_power_of_2(num_squares), REGISTERS=112 if is_small else 240, num_warps=4,
        maxnreg=80 if is_small else 168, **early_launch(rows.device),
    )  # fmt: skip
    return out, deferred
