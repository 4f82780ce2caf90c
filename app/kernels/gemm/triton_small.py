# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Products of few rows (a decode step's) with a weight on a GPU, and the `OPS` that use them.

Such a product is bound by reading the weight once. What counts is that every multiprocessor has enough of it on its
way, and that nothing is launched that could ride along: gate, up and their activation are one launch, and a product
with few columns is split along K, its fp32 shares added up, in a fixed order, by the kernel that reads them next
(`fused.add_rms_norm`). Measured against cuBLAS by `python -m benchmarks.small_linear`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from app.kernels.fused.triton_ops import silu_and_mul
from app.kernels.gemm import LinearOps

MOST_ROWS = 64  # beyond, cuBLAS is as fast
_DTYPES = (torch.bfloat16, torch.float16)
# Programs that a product which may be split should have at least: about two for each multiprocessor.
_PROGRAMS = 256


@dataclass(slots=True, frozen=True)
class SmallTile:
    """Tile sizes and launch options of the kernel."""

    columns: int
    depth: int
    num_warps: int
    num_stages: int
    splits: int = 1  # of K


@triton.jit(do_not_specialize=["T"])
def small_linear_kernel(
    p_x, p_weight, p_bias, p_out, T, N, K, depth, stride_x,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GATED: tl.constexpr, HAS_BIAS: tl.constexpr,
    EVEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of N, splits of K): x [T, K] times rows of weight [N or 2 N, K], `depth` of K in each split."""
    i_n, i_split = tl.program_id(0), tl.program_id(1)
    o_m, o_n, o_k = tl.arange(0, BM), i_n * BN + tl.arange(0, BN), i_split * depth + tl.arange(0, BK)
    m_m, m_n = o_m[:, None] < T, o_n[:, None] < N
    p_rows = p_x + o_m[:, None] * stride_x + o_k[None, :]
    p_w = p_weight + o_n[:, None].to(tl.int64) * K + o_k[None, :]
    o_up = N.to(tl.int64) * K
    b_acc = tl.zeros([BM, BN], dtype=tl.float32)
    b_up = tl.zeros([BM, BN], dtype=tl.float32)
    for i_k in range(0, depth, BK):
        b_x = tl.load(p_rows + i_k, mask=m_m, other=0.0)
        if EVEN:
            b_w = tl.load(p_w + i_k)
        else:
            b_w = tl.load(p_w + i_k, mask=m_n, other=0.0)
        b_acc = tl.dot(b_x, tl.trans(b_w), b_acc, input_precision=PRECISION)
        if GATED:
            if EVEN:
                b_w = tl.load(p_w + o_up + i_k)
            else:
                b_w = tl.load(p_w + o_up + i_k, mask=m_n, other=0.0)
            b_up = tl.dot(b_x, tl.trans(b_w), b_up, input_precision=PRECISION)
    if HAS_BIAS:
        m_bias = (o_n < N) & (i_split == 0)
        b_acc += tl.load(p_bias + o_n, mask=m_bias, other=0.0).to(tl.float32)[None, :]
        if GATED:
            b_up += tl.load(p_bias + N + o_n, mask=m_bias, other=0.0).to(tl.float32)[None, :]
    if GATED:
        # Rounded in between, as where the two are written and read again.
        b_acc = b_acc.to(p_x.dtype.element_ty).to(tl.float32)
        b_acc = b_acc * tl.sigmoid(b_acc) * b_up.to(p_x.dtype.element_ty).to(tl.float32)
    p_o = p_out + (i_split * T + o_m[:, None]).to(tl.int64) * N + o_n[None, :]
    tl.store(p_o, b_acc.to(p_out.dtype.element_ty), mask=m_m & (o_n[None, :] < N))


def small_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, tile: SmallTile, *, gated: bool = False
) -> torch.Tensor:
    """x [T, K] times weight [N, K] (gated: [2 N, K]) transposed: [T, N]; with splits fp32 [splits, T, N]."""
    num_rows, size = x.shape
    columns = weight.shape[0] // 2 if gated else weight.shape[0]
    splits = tile.splits
    assert size % (tile.depth * splits) == 0, (size, tile)
    assert x.stride(1) == weight.stride(1) == 1, "rows must be contiguous"
    assert weight.stride(0) == size, "the weight must be contiguous"
    shape, dtype = ((num_rows, columns), x.dtype) if splits == 1 else ((splits, num_rows, columns), torch.float32)
    out = torch.empty(shape, dtype=dtype, device=x.device)
    small_linear_kernel[(triton.cdiv(columns, tile.columns), splits)](
        x, weight, weight if bias is None else bias, out, num_rows, columns, size, size // splits, x.stride(0),
        BM=max(16, triton.next_power_of_2(num_rows)), BN=tile.columns, BK=tile.depth, GATED=gated,
        HAS_BIAS=bias is not None, EVEN=columns % tile.columns == 0,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    return out


def whole_tile(num_rows: int, columns: int, size: int) -> SmallTile | None:
    """For a product that no one adds up: only where there are enough columns for all multiprocessors, as in a head."""
    if columns < 32 * _PROGRAMS:
        return None
    return _fitting(SmallTile(64, 128 if num_rows <= 32 else 64, 4, 3), size)


def split_tile(columns: int, size: int) -> SmallTile | None:
    """For a product whose shares the next kernel adds up."""
    tile = SmallTile(64 if columns >= 2048 else 32, 64, 4, 5)
    splits = 1
    while splits < 8 and triton.cdiv(columns, tile.columns) * splits < _PROGRAMS:
        if size % (2 * splits * tile.depth):
            break
        splits *= 2
    return _fitting(replace(tile, splits=splits), size)


def gated_tile(num_rows: int, columns: int, size: int) -> SmallTile | None:
    """For gate and up with their activation."""
    if columns < 8192:
        return None if 16 < num_rows <= 32 else _fitting(SmallTile(32, 128 if num_rows <= 16 else 64, 4, 5), size)
    return _fitting(SmallTile(64, 128 if num_rows <= 32 else 64, 4, 3), size)


def _fitting(tile: SmallTile, size: int) -> SmallTile | None:
    return None if size % (tile.depth * tile.splits) else tile


def _serves(x: torch.Tensor, weight: torch.Tensor) -> bool:
    return x.shape[0] <= MOST_ROWS and x.dtype in _DTYPES and weight.is_contiguous() and x.stride(1) == 1


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """As `reference.linear`."""
    tile = whole_tile(len(x), *weight.shape) if _serves(x, weight) else None
    return F.linear(x, weight, bias) if tile is None else small_linear(x, weight, bias, tile)


def linear_parts(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """As `linear`, but perhaps fp32 [P, T, N], still to be summed up."""
    tile = split_tile(*weight.shape) if _serves(x, weight) else None
    return F.linear(x, weight, bias) if tile is None else small_linear(x, weight, bias, tile)


def gated_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """As `reference.gated_linear`."""
    columns, size = weight.shape[0] // 2, weight.shape[1]
    tile = gated_tile(len(x), columns, size) if _serves(x, weight) else None
    if tile is None:
        return silu_and_mul(F.linear(x, weight, bias))
    return small_linear(x, weight, bias, tile, gated=True)


OPS = LinearOps(linear=linear, linear_parts=linear_parts, gated_linear=gated_linear)
