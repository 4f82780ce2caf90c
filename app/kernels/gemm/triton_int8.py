# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Products of many rows of int8 with int8 weights on a GPU, sums exact in int32, scaled in the same launch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from app.kernels.gemm.int8 import Int8Weight
from app.kernels.kernel_table import Kernel
from app.kernels.launch import cdiv
from app.kernels.quick_launch import quick_launch

_PROGRAMS = 200  # so many large tiles keep all multiprocessors busy


@dataclass(slots=True, frozen=True)
class Int8Tile:
    """Tile sizes and launch options."""

    rows: int
    columns: int
    depth: int
    num_warps: int
    num_stages: int


def fills(num_rows: int, columns: int) -> bool:
    """True if large tiles fill the GPU."""
    return cdiv(num_rows, 128) * cdiv(columns, 256) >= _PROGRAMS


@quick_launch
@triton.jit(do_not_specialize=["T"])
def int8_kernel(
    d_x, d_weight, p_row_scales, p_scales, p_sums, p_zero, p_bias, p_out, T, N, K,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Grid (tiles,): p_out [T, N] = x [T, K] times weight [N, K], transposed, times both scales; p_sums [N]: of the
    weight's rows, as often as p_zero, which 0 became, are taken away before."""
    tiles_m, tiles_n = tl.cdiv(T, BM), tl.cdiv(N, BN)
    i_group = tl.program_id(0) // (GROUP * tiles_n)  # tiles that share weights run together
    height = tl.minimum(tiles_m - i_group * GROUP, GROUP)
    i_in = tl.program_id(0) % (GROUP * tiles_n)
    i_m, i_n = i_group * GROUP + i_in % height, i_in // height
    b_acc = tl.zeros([BM, BN], dtype=tl.int32)
    for i_k in range(0, K, BK):
        b_x = d_x.load([i_m * BM, i_k])
        b_w = d_weight.load([i_n * BN, i_k])
        b_acc = tl.dot(b_x, b_w.T, b_acc, out_dtype=tl.int32)
    o_m, o_n = i_m * BM + tl.arange(0, BM), i_n * BN + tl.arange(0, BN)
    m_m, m_n = o_m < T, o_n < N
    if p_zero is not None:
        b_acc -= (tl.load(p_zero).to(tl.int32) * tl.load(p_sums + o_n, mask=m_n, other=0))[None, :]
    b_out = b_acc.to(tl.float32) * tl.load(p_row_scales + o_m, mask=m_m, other=0.0)[:, None]
    b_out *= tl.load(p_scales + o_n, mask=m_n, other=0.0)[None, :]
    if p_bias is not None:
        b_out += tl.load(p_bias + o_n, mask=m_n, other=0.0).to(tl.float32)[None, :]
    p_o = p_out + o_m[:, None].to(tl.int64) * N + o_n[None, :]
    tl.store(p_o, b_out.to(p_out.dtype.element_ty), mask=m_m[:, None] & m_n[None, :])


def int8_product(
    x: torch.Tensor,
    row_scales: torch.Tensor,
    weight: Int8Weight,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    tile: Int8Tile,
) -> torch.Tensor:
    """int8 x [T, K in whole blocks] with scales [T, 1] times weight [N, K], transposed: [T, N] of `dtype`."""
    codes = weight.tiles.words.view(torch.int8)
    (num_rows, size), columns = x.shape, len(codes)
    out = torch.empty(num_rows, columns, dtype=dtype, device=x.device)
    d_x = TensorDescriptor(x, [num_rows, size], [size, 1], [tile.rows, tile.depth])
    d_weight = TensorDescriptor(codes, [columns, size], [size, 1], [tile.columns, tile.depth])
    int8_kernel[(cdiv(num_rows, tile.rows) * cdiv(columns, tile.columns),)](
        d_x, d_weight, row_scales, weight.tiles.scales, weight.sums, weight.input_zero, bias, out, num_rows, columns,
        size, BM=tile.rows, BN=tile.columns, BK=tile.depth, GROUP=8, num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )  # fmt: skip
    return out


def serves(num_rows: int, weight: Int8Weight) -> Int8Tile:
    """The tile for any number of rows."""
    return Int8Tile(128, 256, 128, 8, 4) if fills(num_rows, weight.shape[0]) else Int8Tile(64, 128, 128, 4, 4)


KERNEL = Kernel(serves, int8_product)
