# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""The first half of low-rank products of few rows, as a decode step's, whose base products add the second half.

Such a launch is to be out of the way at once: as many programs as there are slices of the inputs, each of which
computes its slice for all rows, and all jobs one after another; rows of other slots are computed along and left. As in
`triton_shrink`, the program that comes last adds up the fp32 shares, and the base product begins beside it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from app.kernels.gemm import Activations, DeferredNorm
from app.kernels.gemm.triton_low_rank import ranks_at_a_time
from app.kernels.gemm.triton_small import arrival_counters
from app.kernels.launch import cdiv, early_launch, next_power_of_2
from app.kernels.lora import TILE_RANK, SlotMatrices
from app.kernels.lora.triton_shrink import Hidden
from app.kernels.lora.triton_sort import SortedTokens
from app.kernels.quick_launch import beside_others

_DEPTH = 128  # inputs of a slice
_MOST_SLICES = 64  # before they become deeper
_MOST_DEPTH = 512
_MOST_RANKS = 64  # that are multiplied at a time


@triton.jit
def _fetch(p_second, o_line, b_slot, b_tile, N, stride_slot, stride_tile):
    """Have lines of 128 bytes of the second matrices, for 4 outputs each, brought into the cache."""
    o_n = tl.minimum(o_line * 4, N - 1)[:, None] * 16
    p_line = p_second + (tl.maximum(b_slot, 0).to(tl.int64) * stride_slot + b_tile * stride_tile)[None, :] + o_n
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [p_line.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
    )


@beside_others
@triton.jit(do_not_specialize=["T", "num_jobs"])
def shrink_few_kernel(
    p_x, p_squares, p_first, p_second, p_num_tiles, p_slots, p_jobs, p_shares, p_arrived, p_hidden, T, num_jobs, K, N,
    eps, stride_x, stride_slot, stride_tile, stride_back_slot, stride_back_tile,
    PARTS: tl.constexpr, Q: tl.constexpr, BQ: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, BR: tl.constexpr,
    RANKS: tl.constexpr, SLICES: tl.constexpr, LINES: tl.constexpr, PRECISION: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Grid (SLICES, PARTS): p_hidden [T, PARTS, RANKS] = x first^T of each token's slot. p_squares [T, Q]: x is divided
    by its rows' RMS. p_shares [PARTS, SLICES, BM, RANKS]; p_arrived [PARTS] is zero before and after. What the next
    launch reads of p_second, of N outputs, is fetched, LINES by each program."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    i_slice, i_part = tl.program_id(0), tl.program_id(1)
    o_m, o_k, o_r = tl.arange(0, BM), i_slice * BK + tl.arange(0, BK), tl.arange(0, BR)
    m_m = o_m[:, None] < T
    count = tl.load(p_jobs + 2 * num_jobs)
    b_slot, b_tile = tl.load(p_jobs + o_r // 16), tl.load(p_jobs + num_jobs + o_r // 16)
    b_row = tl.load(p_slots + o_m, mask=o_m < T, other=-1)
    b_x = tl.load(p_x + o_m[:, None] * stride_x + o_k[None, :], mask=m_m, other=0.0)
    if count == 0:
        return
    b_ranks = tl.load(p_num_tiles + b_row, mask=b_row >= 0, other=0)[:, None] * 16
    p_sums = p_shares + (i_part * SLICES * BM + o_m[:, None]) * RANKS
    for i_j in range(0, count, BR // 16):
        o_a = b_slot.to(tl.int64) * stride_slot + b_tile * stride_tile + (i_part * 16 + o_r % 16) * K
        b_a = tl.load(p_first + o_a[:, None] + o_k[None, :], mask=(b_slot >= 0)[:, None], other=0.0)
        if EARLY:
            o_j = i_j + tl.arange(0, BR // 16)
            o_line = (i_part * SLICES + i_slice) * LINES + tl.arange(0, LINES)
            _fetch(
                p_second, o_line, tl.load(p_jobs + o_j), tl.load(p_jobs + num_jobs + o_j), N, stride_back_slot,
                stride_back_tile,
            )  # fmt: skip
        m_own = (b_row[:, None] == b_slot[None, :]) & (b_slot >= 0)[None, :]
        p_own = p_sums + i_slice * BM * RANKS + (b_tile * 16 + o_r % 16)[None, :]
        o_j = i_j + BR // 16 + o_r // 16  # the next ones are on their way with the matrices
        b_slot = tl.load(p_jobs + o_j, mask=o_j < num_jobs, other=-1)
        b_tile = tl.load(p_jobs + num_jobs + o_j, mask=o_j < num_jobs, other=0)
        tl.store(p_own, tl.dot(b_x, tl.trans(b_a), input_precision=PRECISION), mask=m_own)
    tl.debug_barrier()  # all threads have stored before one of them says so
    arrived = tl.atomic_add(p_arrived + i_part, 1, sem="acq_rel")
    if arrived < SLICES - 1:
        return
    tl.debug_barrier()
    tl.store(p_arrived + i_part, 0)  # for the next launch
    if p_squares is not None:
        o_q = tl.arange(0, BQ)[None, :]
        b_squares = tl.load(p_squares + o_m[:, None] * Q + o_q, mask=m_m & (o_q < Q), other=0.0)
        b_scale = tl.rsqrt(tl.sum(b_squares, 1)[:, None] / K + eps)
    for i_r in range(0, tl.max(b_ranks), 16):
        o_rank = i_r + tl.arange(0, 16)[None, :]
        m_own = o_rank < b_ranks
        b_sum = tl.zeros([BM, 16], dtype=tl.float32)
        for i in tl.static_range(0, SLICES):
            b_sum += tl.load(p_sums + i * BM * RANKS + o_rank, mask=m_own, other=0.0, cache_modifier=".cg")
        if p_squares is not None:
            b_sum *= b_scale
        p_h = p_hidden + (o_m[:, None] * PARTS + i_part) * RANKS + o_rank
        tl.store(p_h, b_sum.to(p_hidden.dtype.element_ty), mask=m_own)


def depth_of(size: int) -> int | None:
    """Inputs of a slice; None: there is no good one."""
    depth = _DEPTH
    while size % depth and depth > TILE_RANK:
        depth //= 2
    while size // depth > _MOST_SLICES and depth < _MOST_DEPTH and size % (2 * depth) == 0:
        depth *= 2
    return depth if size % depth == 0 and size // depth <= _MOST_SLICES else None


def shrink_few(x: Activations, matrices: SlotMatrices, rows: SortedTokens, depth: int) -> Hidden:
    """Does what `shrink` does, for as many rows as one program has."""
    first, second = matrices.first, matrices.second
    x, squares, eps = (x.rows, x.squares, x.eps) if isinstance(x, DeferredNorm) else (x, None, 0.0)
    assert x.stride(1) == 1, "rows must be contiguous"
    num_slots, tiles, parts, _, size = first.shape
    num_rows, slices = len(x), size // depth
    height, ranks = max(16, next_power_of_2(num_rows)), tiles * TILE_RANK
    hidden = torch.empty(num_rows, parts, ranks, dtype=first.dtype, device=x.device)
    shares = torch.empty(parts * slices * height * ranks, dtype=torch.float32, device=x.device)
    num_squares = 1 if squares is None else squares.shape[1]
    arrived = arrival_counters(x.device, "shrink")
    shrink_few_kernel[(slices, parts)](
        x, squares, first, second, matrices.num_tiles, rows.slots, rows.jobs, shares, arrived, hidden, num_rows,
        len(rows.jobs) // 2, size, second.shape[2], eps, x.stride(0), first.stride(0), first.stride(1),
        second.stride(0), second.stride(1),
        PARTS=parts, Q=num_squares, BQ=next_power_of_2(num_squares), BM=height, BK=depth,
        BR=ranks_at_a_time(num_rows, num_slots, ranks, _MOST_RANKS), RANKS=ranks, SLICES=slices,
        LINES=next_power_of_2(cdiv(second.shape[2], 4 * slices * parts)),
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32", num_warps=4, num_stages=2, **early_launch(x.device),
    )  # fmt: skip
    return Hidden(hidden, shares)
