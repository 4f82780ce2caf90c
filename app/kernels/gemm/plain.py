"""Launches of `gluon_plain`: products of few rows with plain weights on Hopper GPUs, and the `OPS` that use them.

What this kernel does not serve is `triton_small`'s, or a library's. The rule for tiles was read off measurements on an
H200 (benchmarks/RESULTS.md).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from app.kernels.fused import GatedActivation
from app.kernels.gemm import Activations, DeferredActivation, DeferredNorm, GatedRows, Inputs, materialize, triton_small
from app.kernels.gemm.gluon_plain import DEPTH, plain_linear_kernel
from app.kernels.gemm.small_tiles import may_defer_norm
from app.kernels.gemm.triton_small import arrival_counters
from app.kernels.gemm.triton_small_sum import linear_sum_norm
from app.kernels.launch import cdiv, early_launch, multiprocessors, next_power_of_2

MOST_ROWS = 32  # beyond, others are as fast
_REGISTERS = 128  # of a thread, so that two programs are on a multiprocessor
_ALIGNED = 16  # bytes: the copy engine's
_SIZES = (2560,)  # of the hidden state, as far as it was measured: at 4,096 Nemotron-H's steps took 3 % more
_LEAST_BYTES = 16_000_000  # of a weight
_MOST_COLUMNS = 32_768  # a vocabulary is triton_small's
_LEAST_PROGRAMS = 64
_MANY_ROWS = 16  # more have larger tiles, and fewer parts of K
_LEAST_SHARE, _LEAST_LARGE_SHARE = 1024, 1536  # of K, for a part
# Bytes of the stages of a program that is alone on a multiprocessor, and of one of two.
_ALONE_BYTES, _BESIDE_BYTES = 222 << 10, 110 << 10


@dataclass(slots=True, frozen=True)
class PlainTile:
    """Tile sizes and launch options of the kernel."""

    columns: int  # rows of the weight; gate's and up's together
    boxes: int  # of 64 inputs, in a stage
    stages: int
    splits: int = 1  # parts that K is cut into


def plain_tile(
    x: Activations, weight: torch.Tensor, *, is_gated: bool = False, splits_up: bool = False
) -> PlainTile | None:
    """The tile of a product; None: another kernel's. `splits_up`: K may be cut into parts."""
    rows = x.rows if isinstance(x, DeferredNorm) else x
    (num_rows, size), columns = rows.shape, weight.shape[0]
    if not (0 < num_rows <= MOST_ROWS and weight.nbytes >= _LEAST_BYTES and columns <= _MOST_COLUMNS):
        return None
    if (columns if splits_up else size) not in _SIZES:
        return None
    boxes = 2 if size % (2 * DEPTH.value) == 0 else 1
    if not serves(rows, weight) or size % (boxes * DEPTH.value):
        return None
    is_alone = is_gated or (num_rows > _MANY_ROWS and not splits_up)
    tile = PlainTile(128 if is_alone else 64, boxes, 1)
    if splits_up:
        least = _LEAST_SHARE if num_rows <= _MANY_ROWS else _LEAST_LARGE_SHARE
        most = min(size // least, 2 * multiprocessors(rows.device) // cdiv(columns, tile.columns))
        even = (splits for splits in range(most, 1, -1) if size % (splits * boxes * DEPTH.value) == 0)
        tile = replace(tile, splits=next(even, 1))
    if cdiv(columns, tile.columns) * tile.splits < _LEAST_PROGRAMS:
        return None
    stage = (tile.columns + height_of(num_rows)) * boxes * DEPTH.value * weight.element_size()
    return replace(tile, stages=(_ALONE_BYTES if is_alone else _BESIDE_BYTES) // stage)


def serves(rows: torch.Tensor, weight: torch.Tensor) -> bool:
    """True if the copy engine takes both."""
    return (
        rows.dtype == weight.dtype == torch.bfloat16
        and weight.is_contiguous()
        and rows.stride(1) == 1
        and rows.data_ptr() % _ALIGNED == weight.data_ptr() % _ALIGNED == 0
        and 2 * rows.stride(0) % _ALIGNED == 2 * weight.stride(0) % _ALIGNED == 0
    )


def height_of(num_rows: int) -> int:
    """Rows of x in a tile."""
    return max(8, next_power_of_2(num_rows))


def plain_linear(
    x: Activations,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    tile: PlainTile,
    *,
    activation: GatedActivation | None = None,
    residual: torch.Tensor | None = None,
    norm: tuple[torch.Tensor, float] | None = None,
) -> tuple[torch.Tensor, DeferredNorm | None]:
    """The same as `wide.wide_linear`, of a weight [N, K]."""
    rows, squares, eps = (x.rows, x.squares, x.eps) if isinstance(x, DeferredNorm) else (x, None, 0.0)
    (num_rows, size), columns = rows.shape, weight.shape[0]
    depth, tiles, height = DEPTH.value, cdiv(columns, tile.columns), height_of(num_rows)
    assert size % (depth * tile.boxes * tile.splits) == 0, (size, tile)
    out = torch.empty(num_rows, columns // 2 if activation else columns, dtype=rows.dtype, device=rows.device)
    deferred = shares = arrived = None
    if norm is not None:
        new_squares = torch.empty(num_rows, tiles, dtype=torch.float32, device=rows.device)
        deferred = DeferredNorm(torch.empty_like(out), new_squares, norm[1])
    if tile.splits > 1:
        shares = torch.empty(tiles * tile.splits, tile.columns, height, device=rows.device)
        arrived = arrival_counters(rows.device)
    panels = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    d_x = TensorDescriptor(rows, list(rows.shape), list(rows.stride()), [height, depth], panels)
    box = tile.columns // 2 if activation else tile.columns
    d_weight = TensorDescriptor(weight, list(weight.shape), list(weight.stride()), [box, depth], panels)
    num_squares = 1 if squares is None else squares.shape[1]
    plain_linear_kernel[tiles, tile.splits](
        d_x=d_x, d_weight=d_weight, p_bias=bias, p_squares=squares, p_residual=residual,
        p_norm=norm[0] if norm else None, p_shares=shares, p_arrived=arrived, p_out=out,
        p_rows=deferred.rows if deferred else None, p_new_squares=deferred.squares if deferred else None,
        T=num_rows, N=columns, K=size, stride_residual=0 if residual is None else residual.stride(0), eps=eps,
        BM=height, TILE=tile.columns, BOXES=tile.boxes, STAGES=tile.stages, SPLITS=tile.splits,
        GATED=activation is not None, ACT=activation or "silu", P=num_squares, BP=next_power_of_2(num_squares),
        num_warps=4, maxnreg=_REGISTERS, **early_launch(rows.device),
    )  # fmt: skip
    return out, deferred


def linear(x: Inputs, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """The same as `reference.linear`."""
    x = x.materialize() if isinstance(x, DeferredActivation) else x
    tile = plain_tile(x, weight) if isinstance(x, DeferredNorm) else None
    return triton_small.linear(x, weight, bias) if tile is None else plain_linear(x, weight, bias, tile)[0]


def gated_linear(
    x: Activations, weight: torch.Tensor, bias: torch.Tensor | None, activation: GatedActivation
) -> torch.Tensor:
    """The same as `reference.OPS.gated_linear`."""
    if (tile := plain_tile(x, weight, is_gated=True)) is None:
        return triton_small.gated_linear(x, weight, bias, activation)
    return plain_linear(x, weight, bias, tile, activation=activation)[0]


def linear_add_norm(
    x: GatedRows,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    may_defer: bool,
) -> tuple[Activations, torch.Tensor]:
    """The same as `reference.OPS.linear_add_norm`, but the norm may be deferred."""
    x = materialize(x)
    tile = plain_tile(x, weight, splits_up=True) if may_defer and may_defer_norm(len(weight), x.dtype, 64) else None
    if tile is None:
        return triton_small.linear_add_norm(x, weight, bias, residual, norm_weight, eps, may_defer)
    total, deferred = plain_linear(x, weight, bias, tile, residual=residual, norm=(norm_weight, eps))
    assert deferred is not None
    return deferred, total


OPS = replace(
    triton_small.OPS,
    linear=linear,
    gated_linear=gated_linear,
    linear_add_norm=linear_add_norm,
    linear_sum_norm=linear_sum_norm,
    beside_adapters=triton_small.OPS,
)
