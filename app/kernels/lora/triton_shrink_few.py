# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""The first half of low-rank products of few rows, as a decode step's, whose base products add the second half.

Such a launch is to be out of the way at once, so it has many small programs: each computes a slice of the inputs for
one tile of one adapter's ranks, for the rows of that adapter alone. As in `triton_shrink`, the program of a tile that
comes last adds up the fp32 shares, and the base product begins beside it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from app.kernels.gemm import Activations, DeferredNorm
from app.kernels.gemm.triton_small import arrival_counters
from app.kernels.launch import cdiv, early_launch, next_power_of_2
from app.kernels.lora import TILE_RANK, SlotMatrices
from app.kernels.lora.triton_shrink import Hidden
from app.kernels.lora.triton_sort import SortedTokens
from app.kernels.quick_launch import beside_others

_DEPTH = 128  # inputs that are read at a time
_LEAST_SLICE = 256  # of the inputs
_MOST_SLICES = 32  # before they become longer
_MOST_GROUPS = 16  # programs that share the jobs of a slice


@triton.jit
def _fetch(p_second, o_line, N):
    """Have lines of 128 bytes of a tile of the second matrices, for 4 outputs each, brought into the cache."""
    p_line = p_second + tl.minimum(o_line * 4, N - 1) * 16
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [p_line.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _job(p_jobs, i_job, num_jobs):
    """Slot and tile of a job; those behind the last one are -1, 0."""
    b_slot = tl.load(p_jobs + i_job, mask=i_job < num_jobs, other=-1)
    return b_slot.to(tl.int64), tl.load(p_jobs + num_jobs + i_job, mask=i_job < num_jobs, other=0)


@beside_others
@triton.jit(do_not_specialize=["T", "num_jobs"])
def shrink_few_kernel(
    p_x, p_squares, p_first, p_second, p_slots, p_jobs, p_shares, p_arrived, p_hidden, T, num_jobs, K, N, eps, stride_x,
    stride_slot, stride_tile, stride_back_slot, stride_back_tile,
    PARTS: tl.constexpr, Q: tl.constexpr, BQ: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, SLICE: tl.constexpr,
    SLICES: tl.constexpr, RANKS: tl.constexpr, GROUPS: tl.constexpr, LINES: tl.constexpr, PRECISION: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Grid (SLICES, PARTS, GROUPS): p_hidden [T, PARTS, RANKS] = x first^T of each token's slot. p_squares [T, Q]: x is
    divided by its rows' RMS. p_shares [PARTS, SLICES, BM, RANKS]; p_arrived [PARTS * GROUPS] is zero before and after.
    What the next launch reads of p_second, of N outputs, is fetched, LINES of each tile by each program."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    i_slice, i_part, i_group = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    o_m, o_k, o_r = tl.arange(0, BM), i_slice * SLICE + tl.arange(0, BK), tl.arange(0, 16)
    count = tl.load(p_jobs + 2 * num_jobs)
    b_row = tl.load(p_slots + o_m, mask=o_m < T, other=-1)
    # The first job is on its way with their number: each wait for memory is a tenth of the launch.
    first_slot, first_tile = _job(p_jobs, i_group, num_jobs)
    if i_group >= count:
        return
    p_rows = p_x + o_m[:, None] * stride_x + o_k[None, :]
    p_sums = p_shares + (i_part * SLICES * BM + o_m[:, None]) * RANKS + o_r[None, :]
    b_slot, b_tile = first_slot, first_tile
    for i_job in range(i_group, count, GROUPS):
        m_own = (b_row == b_slot)[:, None]
        p_a = p_first + b_slot * stride_slot + b_tile * stride_tile + (i_part * 16 + o_r[:, None]) * K + o_k[None, :]
        b_acc = tl.zeros([BM, 16], dtype=tl.float32)
        for i_k in range(0, SLICE, BK):
            b_x = tl.load(p_rows + i_k, mask=m_own, other=0.0)
            b_acc = tl.dot(b_x, tl.trans(tl.load(p_a + i_k)), b_acc, input_precision=PRECISION)
        if EARLY:
            o_line = (i_part * SLICES + i_slice) * LINES + tl.arange(0, LINES)
            _fetch(p_second + b_slot * stride_back_slot + b_tile * stride_back_tile, o_line, N)
        tl.store(p_sums + i_slice * BM * RANKS + b_tile * 16, b_acc, mask=m_own)
        b_slot, b_tile = _job(p_jobs, i_job + GROUPS, num_jobs)
    tl.debug_barrier()  # all threads have stored before one of them says so
    i_counter = i_part * GROUPS + i_group
    arrived = tl.atomic_add(p_arrived + i_counter, 1, sem="acq_rel")
    if arrived < SLICES - 1:
        return
    tl.debug_barrier()
    tl.store(p_arrived + i_counter, 0)  # for the next launch
    if p_squares is not None:
        o_q = tl.arange(0, BQ)[None, :]
        b_squares = tl.load(p_squares + o_m[:, None] * Q + o_q, mask=(o_m[:, None] < T) & (o_q < Q), other=0.0)
        b_scale = tl.rsqrt(tl.sum(b_squares, 1)[:, None] / K + eps)
    p_h = p_hidden + (o_m[:, None] * PARTS + i_part) * RANKS + o_r[None, :]
    b_slot, b_tile = first_slot, first_tile
    for i_job in range(i_group, count, GROUPS):
        m_own = (b_row == b_slot)[:, None]
        b_sum = tl.zeros([BM, 16], dtype=tl.float32)
        for i in tl.static_range(0, SLICES):
            p_own = p_sums + i * BM * RANKS + b_tile * 16
            b_sum += tl.load(p_own, mask=m_own, other=0.0, cache_modifier=".cg")
        if p_squares is not None:
            b_sum *= b_scale
        tl.store(p_h + b_tile * 16, b_sum.to(p_hidden.dtype.element_ty), mask=m_own)
        b_slot, b_tile = _job(p_jobs, i_job + GROUPS, num_jobs)


def slice_of(size: int) -> int | None:
    """Inputs of a slice; None: there is no good one."""
    depth = _depth(size)
    length = depth * max(1, min(_LEAST_SLICE // depth, size // depth))
    while size % length and length > depth:
        length -= depth
    while size // length > _MOST_SLICES and size % (2 * length) == 0:
        length *= 2
    return length if size % length == 0 and size // length <= 2 * _MOST_SLICES else None


def _depth(size: int) -> int:
    depth = _DEPTH
    while size % depth and depth > TILE_RANK:
        depth //= 2
    return depth


def shrink_few(x: Activations, matrices: SlotMatrices, rows: SortedTokens, length: int) -> Hidden:
    """Does what `shrink` does, for as many rows as one program has, by slices of so many inputs."""
    first, second = matrices.first, matrices.second
    x, squares, eps = (x.rows, x.squares, x.eps) if isinstance(x, DeferredNorm) else (x, None, 0.0)
    assert x.stride(1) == 1, "rows must be contiguous"
    num_slots, tiles, parts, _, size = first.shape
    num_rows, slices, depth = len(x), size // length, _depth(size)
    height, ranks = max(16, next_power_of_2(num_rows)), tiles * TILE_RANK
    groups = min(_MOST_GROUPS, next_power_of_2(min(num_rows, num_slots) * tiles))
    hidden = torch.empty(num_rows, parts, ranks, dtype=first.dtype, device=x.device)
    shares = torch.empty(parts * slices * height * ranks, dtype=torch.float32, device=x.device)
    num_squares = 1 if squares is None else squares.shape[1]
    arrived = arrival_counters(x.device, "shrink")
    shrink_few_kernel[(slices, parts, groups)](
        x, squares, first, second, rows.slots, rows.jobs, shares, arrived, hidden, num_rows, len(rows.jobs) // 2, size,
        second.shape[2], eps, x.stride(0), first.stride(0), first.stride(1), second.stride(0), second.stride(1),
        PARTS=parts, Q=num_squares, BQ=next_power_of_2(num_squares), BM=height, BK=depth, SLICE=length,
        SLICES=slices, RANKS=ranks, GROUPS=groups, LINES=next_power_of_2(cdiv(second.shape[2], 4 * slices * parts)),
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32", num_warps=4, num_stages=min(4, 1 + length // depth),
        **early_launch(x.device),
    )  # fmt: skip
    return Hidden(hidden, shares)
