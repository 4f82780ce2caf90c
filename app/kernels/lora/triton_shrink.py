# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""The first half of low-rank products on a GPU: each token's inputs times the first matrices of its slot, of all parts
of a layer's outputs, in one launch.

It is split along the inputs, since a step's few chunks would keep few multiprocessors busy; the program of a chunk that
comes last adds up the fp32 shares in a fixed order (no atomic sums, I6), and divides a deferred norm. It lets the next
launch begin as soon as it may itself: the base product reads its weight meanwhile.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from app.kernels.gemm import DeferredNorm, Inputs, materialize
from app.kernels.gemm.triton_small import arrival_counters
from app.kernels.launch import cdiv, early_launch, next_power_of_2
from app.kernels.lora import TILE_RANK, SlotMatrices
from app.kernels.lora.triton_sort import SortedTokens
from app.kernels.quick_launch import quick_launch

_MOST_SPLITS = {16: 16, 64: 8}  # by the tokens of a chunk
_LEAST_DEPTH = 256  # of a split's inputs
_DEPTH = 128  # inputs that a program reads at a time
_MOST_COUNTED = 4096  # chunks and blocks of ranks, where the inputs are split


@dataclass(slots=True, frozen=True)
class Hidden:
    """Holds what a step's tokens have between the two matrices. Memory that the launch needs stays as long as this: the
    next launch may run beside it."""

    values: torch.Tensor  # [T, P, tiles * TILE_RANK], in the type of the matrices
    shares: torch.Tensor | None


@quick_launch
@triton.jit(do_not_specialize=["T", "C"])
def shrink_kernel(
    p_x, p_squares, p_first, p_num_tiles, p_order, p_chunks, p_shares, p_arrived, p_hidden, T, C, K, eps, stride_x,
    stride_slot, stride_tile,
    P: tl.constexpr, Q: tl.constexpr, BQ: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, BR: tl.constexpr,
    TILES: tl.constexpr, SPLITS: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Grid (C, SPLITS, TILES * blocks of BR of a tile's P * 16 rows): p_hidden [T, P, TILES * 16] = x first^T, by
    token. p_squares [T, Q]: x is divided by its rows' RMS. p_arrived is zero before and after."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    i_c, i_split, i_b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    b_slot = tl.load(p_chunks + i_c).to(tl.int64)
    b_size = tl.load(p_chunks + 2 * C + i_c)
    if (b_slot < 0) | (b_size == 0):
        return
    BLOCKS: tl.constexpr = (P * 16 + BR - 1) // BR
    i_tile = i_b // BLOCKS
    if i_tile >= tl.load(p_num_tiles + b_slot):
        return
    o_m = tl.arange(0, BM)
    m_m = o_m < b_size
    o_token = tl.load(p_order + tl.load(p_chunks + C + i_c) + o_m, mask=m_m, other=0).to(tl.int64)
    depth = tl.multiple_of(K // SPLITS, BK) if EVEN else K
    o_k, o_r = i_split * depth + tl.arange(0, BK), (i_b % BLOCKS) * BR + tl.arange(0, BR)
    m_r = o_r < P * 16
    p_rows = p_x + o_token[:, None] * stride_x + o_k[None, :]
    p_a = p_first + b_slot * stride_slot + i_tile.to(tl.int64) * stride_tile + o_r[:, None] * K + o_k[None, :]
    if p_squares is not None:
        o_q = tl.arange(0, BQ)[None, :]
        b_squares = tl.load(p_squares + o_token[:, None] * Q + o_q, mask=m_m[:, None] & (o_q < Q), other=0.0)
    b_acc = tl.zeros([BM, BR], dtype=tl.float32)
    for i_k in range(0, depth, BK):
        if EVEN:
            b_x = tl.load(p_rows + i_k, mask=m_m[:, None], other=0.0)
            b_a = tl.load(p_a + i_k, mask=m_r[:, None], other=0.0)
        else:
            m_k = o_k[None, :] + i_k < K
            b_x = tl.load(p_rows + i_k, mask=m_m[:, None] & m_k, other=0.0)
            b_a = tl.load(p_a + i_k, mask=m_r[:, None] & m_k, other=0.0)
        b_acc = tl.dot(b_x, tl.trans(b_a), b_acc, input_precision=PRECISION)
    if SPLITS > 1:
        i_counter = i_c * tl.num_programs(2) + i_b
        p_own = p_shares + (i_counter * SPLITS * BM + o_m[:, None]) * BR + tl.arange(0, BR)[None, :]
        tl.store(p_own + i_split * BM * BR, b_acc)
        tl.debug_barrier()  # all threads have stored before one of them says so
        arrived = tl.atomic_add(p_arrived + i_counter, 1, sem="acq_rel")
        if arrived < SPLITS - 1:
            return
        tl.debug_barrier()
        tl.store(p_arrived + i_counter, 0)  # for the next launch
        b_acc = tl.load(p_own, cache_modifier=".cg")
        for i in tl.static_range(1, SPLITS):
            b_acc += tl.load(p_own + i * BM * BR, cache_modifier=".cg")
    if p_squares is not None:
        b_acc *= tl.rsqrt(tl.sum(b_squares, 1)[:, None] / K + eps)
    o_h = (o_token[:, None] * P + o_r[None, :] // 16) * (TILES * 16) + i_tile * 16 + o_r[None, :] % 16
    tl.store(p_hidden + o_h, b_acc.to(p_hidden.dtype.element_ty), mask=m_m[:, None] & m_r[None, :])


def shrink(x: Inputs, matrices: SlotMatrices, rows: SortedTokens) -> Hidden:
    """x [T, K] times the first matrices of each token's slot; what has no slot, or no such ranks, stays undefined."""
    first = matrices.first
    x, squares, eps = (x.rows, x.squares, x.eps) if isinstance(x, DeferredNorm) else (materialize(x), None, 0.0)
    assert x.stride(1) == 1, "rows must be contiguous"
    _, tiles, parts, _, size = first.shape
    num_tokens, num_chunks, height = len(x), rows.chunks.shape[1], rows.chunk_size
    width = TILE_RANK if height == TILE_RANK else next_power_of_2(parts * TILE_RANK)
    blocks = tiles * cdiv(parts * TILE_RANK, width)
    depth, splits = _depth_and_splits(size, _MOST_SPLITS[16 if x.dtype == torch.float32 else height])
    splits = splits if num_chunks * blocks <= _MOST_COUNTED else 1
    hidden = torch.empty(num_tokens, parts, tiles * TILE_RANK, dtype=first.dtype, device=x.device)
    shares = arrived = None
    if splits > 1:
        shares = torch.empty(num_chunks * blocks * splits * height * width, dtype=torch.float32, device=x.device)
        arrived = arrival_counters(x.device, "shrink")
    num_squares = 1 if squares is None else squares.shape[1]
    shrink_kernel[(num_chunks, splits, blocks)](
        x, squares, first, matrices.num_tiles, rows.order, rows.chunks, shares, arrived, hidden, num_tokens, num_chunks,
        size, eps, x.stride(0), first.stride(0), first.stride(1),
        P=parts, Q=num_squares, BQ=next_power_of_2(num_squares), BM=height, BK=depth, BR=width, TILES=tiles,
        SPLITS=splits, EVEN=size % (depth * splits) == 0, PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        num_warps=4, num_stages=3, **early_launch(x.device),
    )  # fmt: skip
    return Hidden(hidden, shares)


def _depth_and_splits(size: int, most: int) -> tuple[int, int]:
    """Inputs that a program reads at a time, and parts that all of them are cut into: for any number of tokens the
    same, so that a start knows all kernels."""
    depth = _DEPTH
    while depth > TILE_RANK and size % depth:
        depth //= 2
    splits = 1
    while splits < most and size % (2 * splits * depth) == 0 and size >= 2 * splits * _LEAST_DEPTH:
        splits *= 2
    return depth, splits
