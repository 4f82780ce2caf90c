# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Products of few rows whose sum over the ranks of a host, residual and begun norm are in the same launch.

A tile's program that has its sum along K sends it to the other ranks (fused/triton_ranks.py) and takes theirs: a tile
is on its way while others are still being multiplied.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from app.kernels.fused import RankBoxes
from app.kernels.fused.triton_ranks import (
    count_on,
    first_of,
    paired,
    received,
    second_of,
    send,
    serves,
    weights_of,
    words_of,
)
from app.kernels.gemm import DeferredNorm, GatedRows, materialize
from app.kernels.gemm.small_tiles import LEAST_DEPTH, SmallTile, added_tile, may_defer_norm
from app.kernels.gemm.triton_small import arrival_counters, launch_options, leave_share, multiply, sum_of_shares
from app.kernels.launch import cdiv
from app.kernels.quick_launch import quick_launch


@quick_launch
@triton.jit(do_not_specialize=["T", "rank"])
def small_linear_sum_kernel(
    p_x, p_weight, p_bias, p_residual, p_norm, p_shares, p_arrived, p_addresses, p_words, p_clock, p_total, p_rows,
    p_squares, T, N, K, rank, stride_box, stride_x, stride_residual,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SPLITS: tl.constexpr, RANKS: tl.constexpr,
    EVEN: tl.constexpr, PRECISION: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of N, SPLITS of K): p_total [T, N] = x W^T + bias, summed up over the ranks, + residual; p_rows [T,
    N] = p_total * p_norm and p_squares [T, tiles of N]. p_arrived [tiles of N] is zero before and after."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
    i_n, i_split = tl.program_id(0), tl.program_id(1)
    o_m, o_n = tl.arange(0, BM), i_n * BN + tl.arange(0, BN)
    m = (o_m[:, None] < T) & (o_n < N)[None, :]
    depth = tl.multiple_of(K // SPLITS, BK)
    b_acc, _ = multiply(
        p_x, p_weight, o_m, o_n, i_split * depth, depth, T, N, K, stride_x, BM, BN, BK, False, EVEN, PRECISION
    )  # fmt: skip
    if SPLITS > 1:
        o = o_m[:, None].to(tl.int64) * N + o_n[None, :]
        size = T.to(tl.int64) * N
        if leave_share(b_acc, p_shares + i_split * size + o, m, p_arrived, i_n) < SPLITS - 1:
            return
        b_acc = sum_of_shares(p_shares, o, m, size, p_arrived, i_n, SPLITS)
    if p_bias is not None:
        b_acc += tl.load(p_bias + o_n, mask=o_n < N, other=0.0).to(tl.float32)[None, :]
    DTYPE: tl.constexpr = p_total.dtype.element_ty
    pairs: tl.constexpr = tl.pointer_type(tl.int32)
    b_first, b_second = tl.split(tl.reshape(b_acc.to(DTYPE), [BM, BN // 2, 2]))
    o_w = i_n * (BN // 2) + tl.arange(0, BN // 2)
    m_w = o_w < N // 2
    m = (o_m[:, None] < T) & m_w[None, :]
    b_count = tl.load(p_clock) + 1
    b_own = words_of(paired(b_first, b_second), b_count)
    o_set = (b_count & 1).to(tl.int64) * RANKS * stride_box
    o_row = o_m[:, None].to(tl.int64) * (N // 2) + o_w[None, :]
    send(p_addresses, o_set + rank * stride_box + o_row, b_own, m, rank, RANKS)
    o_residual = o_m[:, None] * (stride_residual // 2) + o_w[None, :]
    b_residual = tl.load(p_residual.to(pairs) + o_residual, mask=m, other=0)
    b_norm, b_norm2 = weights_of(p_norm, o_w, m_w, DTYPE)
    parts = received(p_words + o_set, o_row, stride_box, b_own, m, rank, b_count, RANKS)
    b_sum, b_sum2 = first_of(parts[0], DTYPE), second_of(parts[0], DTYPE)
    for i in tl.static_range(1, RANKS):
        b_sum += first_of(parts[i], DTYPE)
        b_sum2 += second_of(parts[i], DTYPE)
    b_low = (b_sum.to(DTYPE).to(tl.float32) + first_of(b_residual, DTYPE)).to(DTYPE)
    b_high = (b_sum2.to(DTYPE).to(tl.float32) + second_of(b_residual, DTYPE)).to(DTYPE)
    tl.store(p_total.to(pairs) + o_row, paired(b_low, b_high), mask=m)
    b_sum, b_sum2 = b_low.to(tl.float32), b_high.to(tl.float32)  # the norm is that of what is stored
    b_squares = tl.sum(tl.where(m, b_sum * b_sum + b_sum2 * b_sum2, 0.0), 1)
    tl.store(p_squares + o_m * tl.num_programs(0) + i_n, b_squares, mask=o_m < T)
    b_sum, b_sum2 = (b_sum * b_norm[None, :]).to(DTYPE), (b_sum2 * b_norm2[None, :]).to(DTYPE)
    tl.store(p_rows.to(pairs) + o_row, paired(b_sum, b_sum2), mask=m)
    count_on(p_clock, b_count, tl.num_programs(0))


def small_linear_sum(
    boxes: RankBoxes,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor,
    tile: SmallTile,
    norm: tuple[torch.Tensor, float],
) -> tuple[DeferredNorm, torch.Tensor]:
    """x [T, K] times weight [N, K], transposed, summed up over the ranks, + residual [T, N] -> (its norm by (weight
    [N], eps), it). Collective."""
    num_rows, size = x.shape
    columns, tiles = weight.shape[0], cdiv(weight.shape[0], tile.columns)
    total = torch.empty(num_rows, columns, dtype=x.dtype, device=x.device)
    shares = arrived = None
    if tile.splits > 1:
        shares = torch.empty(tile.splits, num_rows, columns, dtype=torch.float32, device=x.device)
        arrived = arrival_counters(x.device)
    squares = torch.empty(num_rows, tiles, dtype=torch.float32, device=x.device)
    deferred = DeferredNorm(torch.empty_like(total), squares, norm[1])
    small_linear_sum_kernel[(tiles, tile.splits)](
        x, weight, bias, residual, norm[0], shares, arrived, boxes.addresses, boxes.words, boxes.clock, total,
        deferred.rows, squares, num_rows, columns, size, boxes.rank, boxes.words.shape[2], x.stride(0),
        residual.stride(0), SPLITS=tile.splits, RANKS=boxes.num_ranks, **launch_options(x, weight, columns, tile),
    )  # fmt: skip
    return deferred, total


def linear_sum_norm(
    boxes: RankBoxes,
    x: GatedRows,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
) -> tuple[DeferredNorm, torch.Tensor] | None:
    """See SummedProductThenNorm."""
    x = materialize(x)
    tile = added_tile(x, weight)
    if tile is None or not may_defer_norm(len(weight), x.dtype, LEAST_DEPTH):
        return None
    if x.dtype != residual.dtype or not serves(boxes, residual, residual):
        return None
    return small_linear_sum(boxes, x, weight, bias, residual, tile, (norm_weight, eps))
