"""Launches of `triton_packed` and `gluon_packed`, and the `OPS` that use them for packed weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch

from app.kernels.fused import GatedActivation
from app.kernels.fused.reference import rms_norm
from app.kernels.fused.triton_ops import add_rms_norm
from app.kernels.gemm import (
    Activations,
    DeferredActivation,
    DeferredNorm,
    GatedRows,
    Inputs,
    LinearOps,
    QuantizedNorm,
    gluon_packed,
    materialize,
)
from app.kernels.gemm.small_tiles import may_defer_norm
from app.kernels.gemm.stored import StoredTiles, bits_of
from app.kernels.gemm.tiled import TiledWeight
from app.kernels.gemm.triton_packed import packed_linear_kernel
from app.kernels.gemm.triton_quantize import add_norm_quantize
from app.kernels.gemm.triton_quantized import numbers_of
from app.kernels.gemm.triton_small import arrival_counters
from app.kernels.gemm.wide import WideTile, wide_linear, wide_tile
from app.kernels.kernel_table import FROM_AMPERE, HOPPER, Candidate, KernelTable
from app.kernels.launch import (
    cdiv,
    early_launch,
    next_power_of_2,
    register_limit,
    shared_memory,
)

MOST_ROWS = 64  # beyond, tensor cores of 8 bits, or dequantized rows and cuBLAS, are faster
_MOST_ROWS_OF_4_BITS = 512
_MOST_STREAMED_ROWS = 8  # columns of a tensor core's product
_TABLE_REGISTERS = 128  # of a thread at most, so that 16 warps run at a time
InputsT = TypeVar("InputsT", bound=Inputs)
_DTYPES = (torch.bfloat16, torch.float16)
_MOST_HEIGHT = 64  # rows of x in a tile
_PROGRAMS = 300  # two or three for each multiprocessor
_MOST_SPLITS = 8
_LEAST_DEPTH = 512  # a split's share of K


@dataclass(slots=True, frozen=True)
class PackedTile:
    """Tile sizes and launch options of the kernel."""

    columns: int
    height: int = 16  # rows of x
    num_warps: int = 4
    num_stages: int = 3
    splits: int = 1  # parts that K is cut into
    is_wide: bool = False  # weights are multiplied by their scales, not sums


@dataclass(slots=True, frozen=True)
class StreamedTile:
    """Tile sizes and launch options of the kernel in Gluon."""

    columns: int  # 16 for each warp of a group
    num_warps: int
    groups: int  # of warps, among which blocks are dealt out
    height: int = 8  # rows of x
    ahead: int = 2  # blocks of a group that are on their way


def packed_linear(
    x: Activations,
    weight: StoredTiles,
    bias: torch.Tensor | None,
    tile: Tile,
    *,
    activation: GatedActivation | None = None,
    residual: torch.Tensor | None = None,
    norm: tuple[torch.Tensor, float] | None = None,
    is_beside: bool = False,
) -> tuple[torch.Tensor, DeferredNorm | None]:
    """x [T, K] times weight [N, K], transposed, + residual [T, N], and its norm by (weight [N], eps). `is_beside`: the
    launch before writes nothing that it reads.

    With an activation the weight holds gate and up, and the product is [T, N / 2].
    """
    if isinstance(tile, WideTile):
        return wide_linear(x, weight, bias, tile, activation=activation, residual=residual, norm=norm)
    rows, squares, eps = (x.rows, x.squares, x.eps) if isinstance(x, DeferredNorm) else (x, None, 0.0)
    (num_rows, size), columns = rows.shape, weight.shape[0]
    assert rows.stride(1) == 1, "rows must be contiguous"
    half = columns // 2 if activation else columns
    tiles, height = cdiv(columns, tile.columns), tile.height
    if activation:
        tiles = cdiv(half, tile.columns // 2)
    out = torch.empty(num_rows, half, dtype=rows.dtype, device=rows.device)
    deferred = None
    if norm is not None:
        new_squares = torch.empty(num_rows, tiles, dtype=torch.float32, device=rows.device)
        deferred = DeferredNorm(torch.empty_like(out), new_squares, norm[1])
    num_squares = 1 if squares is None else squares.shape[1]
    arguments = {
        "p_x": rows, "p_words": weight.words, "p_scales": weight.scales, "p_offsets": weight.offsets, "p_bias": bias,
        "p_squares": squares, "p_residual": residual, "p_norm": norm[0] if norm else None, "p_out": out,
        "p_rows": deferred.rows if deferred else None, "p_new_squares": deferred.squares if deferred else None,
        "T": num_rows, "N": columns, "K": size, "row": weight.words.shape[1], "stride_x": rows.stride(0),
        "stride_residual": 0 if residual is None else residual.stride(0), "num_scales": weight.scales.shape[1],
        "num_blocks": cdiv(size, weight.block), "eps": eps, "BM": height, "BN": tile.columns, "BK": weight.block,
        "FORM": weight.form, "ROWS": weight.scale_rows,
        "TABLES": weight.table is not None and weight.table.dim() == 2, "GATED": activation is not None,
        "ACT": activation or "silu", "P": num_squares, "BP": next_power_of_2(num_squares),
        "EVEN_K": size % weight.block == 0, "num_warps": tile.num_warps, **early_launch(rows.device),
    }  # fmt: skip
    grid = tiles, cdiv(num_rows, height)
    if isinstance(tile, StreamedTile):
        _launch_streamed(grid, arguments, rows, weight, tile)
    else:
        _launch_packed(grid, {**arguments, "BESIDE": is_beside}, rows, weight, tile)
    return out, deferred


def _launch_packed(
    grid: tuple[int, int], arguments: dict[str, Any], rows: torch.Tensor, weight: StoredTiles, tile: PackedTile
) -> None:
    """Launch Triton's kernel."""
    (columns, size), num_blocks = weight.shape, arguments["num_blocks"]
    splits = min(tile.splits, num_blocks)
    splits = cdiv(num_blocks, cdiv(num_blocks, splits))  # none is empty
    shares = arrived = None
    if splits > 1:
        shares = torch.empty(splits, len(rows), columns, dtype=torch.float32, device=rows.device)
        arrived = arrival_counters(rows.device)
    num_groups = weight.scales_of_block
    assert num_groups is not None, weight.group
    packed_linear_kernel[grid[0], splits, grid[1]](
        **arguments, p_table=weight.table, p_shares=shares, p_arrived=arrived,
        per=num_blocks if weight.group >= size else weight.group * num_groups // weight.block,
        SPLITS=splits, G=num_groups, EVEN=columns % tile.columns == 0, WIDE=tile.is_wide,
        PRECISION="ieee" if rows.dtype == torch.float32 else "tf32",
        num_stages=stages_within(shared_memory(rows.device), tile, weight),
    )  # fmt: skip


def _launch_streamed(
    grid: tuple[int, int], arguments: dict[str, Any], rows: torch.Tensor, weight: StoredTiles, tile: StreamedTile
) -> None:
    """Launch the kernel in Gluon."""
    num_groups = weight.scales_of_block
    assert num_groups is not None, weight.group
    table = None if weight.table is None else weight.table.to(rows.dtype).view(torch.int32)
    gluon_packed.streamed_linear_kernel[grid](
        **arguments, p_table=table, DEEP=tile.groups, AHEAD=tile.ahead,
        G=max(1, num_groups) if weight.form == "nibble" else num_groups,  # a nibble's scale belongs to its sum
        PER=0 if weight.group >= weight.size else weight.group * num_groups // weight.block,
        **register_limit(_TABLE_REGISTERS if weight.form == "table" else None),
    )  # fmt: skip


def height_for(num_rows: int, weight: StoredTiles) -> int:
    """Rows of x in a tile. Up to 8 take another kind of tensor core product, which pays for 8 bits."""
    least = 8 if bits_of(weight.form) == 8 else 16
    return min(_MOST_HEIGHT, max(least, next_power_of_2(num_rows)))


def stages_within(num_bytes: int, tile: PackedTile, weight: StoredTiles) -> int:
    """The tile's stages, or as many as shared memory holds: each buffers a tile of x and one of the weight."""
    each = (tile.height * 2 + tile.columns * bits_of(weight.form) // 8) * weight.block
    return max(1, min(tile.num_stages, num_bytes // each))


def tile_for(num_rows: int, weight: StoredTiles, *, is_gated: bool = False) -> Tile | None:
    """The tile for a product of so many rows; None: others are faster, or no kernel reads such groups."""
    tiles = (tile_of(num_rows, weight, is_gated) for tile_of in TILES.all_on(weight.words.device))
    return next((tile for tile in tiles if tile is not None), None)


def _wide_tile(num_rows: int, weight: StoredTiles, is_gated: bool) -> WideTile | None:
    return wide_tile(num_rows, weight) if num_rows <= _MOST_ROWS_OF_4_BITS and weight.form == "nibble" else None


def _tall_tile(num_rows: int, weight: StoredTiles, is_gated: bool) -> PackedTile | None:
    if weight.form != "nibble" or weight.offsets is not None or weight.scales_of_block is None:
        return None
    is_many = MOST_ROWS < num_rows <= _MOST_ROWS_OF_4_BITS
    return PackedTile(128, 64 if num_rows <= 256 else 128, 8) if is_many else None


def _streamed_tile(num_rows: int, weight: StoredTiles, is_gated: bool) -> StreamedTile | None:
    is_few = num_rows <= _MOST_STREAMED_ROWS and weight.scales_of_block is not None
    return streamed_tile(weight) if is_few else None


def _packed_tile(num_rows: int, weight: StoredTiles, is_gated: bool) -> PackedTile | None:
    columns, size = weight.shape
    if num_rows > MOST_ROWS or weight.scales_of_block is None:
        return None
    height = height_for(num_rows, weight)
    if is_gated and columns >= 64 * _PROGRAMS:
        is_half = num_rows <= 16 and bits_of(weight.form) == 4
        return PackedTile(128, height, 4 if num_rows <= 16 else 8, 3, 2 if is_half else 1)
    tiles, splits = cdiv(columns, 64), 1
    while splits < _MOST_SPLITS and splits * tiles < _PROGRAMS and size >= 2 * splits * _LEAST_DEPTH:
        splits *= 2
    return PackedTile(64, height, 4, 3, splits)


def streamed_tile(weight: StoredTiles) -> StreamedTile | None:
    """The tile of the kernel in Gluon, which reads no exponents, for few rows; None: Triton's is as fast."""
    if weight.form not in ("nibble", "table"):
        return None
    if weight.shape[0] < 64 * _PROGRAMS:
        return StreamedTile(16, 8, 8)
    if weight.form == "table":
        return StreamedTile(32, 4, 2)
    return None if weight.offsets is None else StreamedTile(16, 4, 4)


Tile = PackedTile | StreamedTile | WideTile  # says which kernel it is of
TILES: KernelTable[Callable[[int, StoredTiles, bool], Tile | None]] = KernelTable(
    "products of few rows with packed weights",
    Candidate(_wide_tile, HOPPER),
    Candidate(_tall_tile),
    Candidate(_streamed_tile, FROM_AMPERE),
    Candidate(_packed_tile),
)


def _tile(rows: torch.Tensor, weight: TiledWeight, *, is_gated: bool = False) -> Tile | None:
    serves = rows.dtype in _DTYPES and rows.stride(1) == 1
    return tile_for(len(rows), weight.stored, is_gated=is_gated) if serves else None


def _inputs(x: Activations, weight: TiledWeight) -> Activations:
    if not isinstance(x, DeferredNorm):
        return weight.inputs(x)
    rows = weight.inputs(x.rows)
    if rows.shape == x.rows.shape:
        return DeferredNorm(rows, x.squares, x.eps)
    return weight.inputs(x.materialize())  # a kernel divides by the number of inputs that it sees


def _activated(x: InputsT, weight: TiledWeight) -> InputsT | torch.Tensor:
    """x, or as the tensor that a kernel of few rows reads."""
    is_few = isinstance(x, DeferredActivation | QuantizedNorm) and tile_for(len(x), weight.stored) is not None
    return materialize(x) if is_few else x


def linear(x: Inputs, weight: TiledWeight, bias: torch.Tensor | None, *, is_beside: bool = False) -> torch.Tensor:
    """The same as `reference.linear`."""
    x = _activated(x, weight)
    if isinstance(x, DeferredActivation | QuantizedNorm):
        return weight.linear(x, bias)
    tile = _tile(_rows(x), weight)
    if tile is None:
        return weight.linear(materialize(x), bias)
    inputs = _inputs(x, weight)
    return packed_linear(inputs, weight.stored, bias, tile, is_beside=is_beside and _rows(inputs) is _rows(x))[0]


def _rows(x: Activations) -> torch.Tensor:
    return x.rows if isinstance(x, DeferredNorm) else x


def gated_linear(
    x: Activations, weight: TiledWeight, bias: torch.Tensor | None, activation: GatedActivation
) -> GatedRows:
    """The same as `reference.OPS.gated_linear`; of many rows the activation is left to the reader."""
    x = _activated(x, weight)
    if isinstance(x, QuantizedNorm):
        return DeferredActivation(weight.linear(x, bias), activation)
    tile = _tile(_rows(x), weight, is_gated=True)
    if tile is None:
        return DeferredActivation(weight.linear(materialize(x), bias), activation)
    return packed_linear(_inputs(x, weight), weight.stored, bias, tile, activation=activation)[0]


def linear_add_norm(
    x: GatedRows,
    weight: TiledWeight,
    bias: torch.Tensor | None,
    residual: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    may_defer: bool,
    *,
    leaves_numbers: bool = False,
) -> tuple[Activations, torch.Tensor]:
    """The same as `reference.OPS.linear_add_norm`, but the norm may be deferred, and come as numbers."""
    x = _activated(x, weight)
    tile = _tile(x, weight) if isinstance(x, torch.Tensor) else None
    if tile is None or not isinstance(x, torch.Tensor):
        kind = numbers_of(weight) if leaves_numbers else None
        if kind is not None:
            return add_norm_quantize(weight.linear(x, bias), residual, norm_weight, eps, kind)
        return add_rms_norm(weight.linear(x, bias), residual, norm_weight, eps)
    norm = (norm_weight, eps) if may_defer and may_defer_norm(weight.shape[0], x.dtype) else None
    total, deferred = packed_linear(weight.inputs(x), weight.stored, bias, tile, residual=residual, norm=norm)
    return deferred or rms_norm(total, norm_weight, eps), total


OPS = LinearOps(
    linear=linear,
    gated_linear=gated_linear,
    linear_add_norm=linear_add_norm,
    linear_add_numbers=partial(linear_add_norm, leaves_numbers=True),
    linear_beside=partial(linear, is_beside=True),
)
