# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Low-rank products on a GPU: two launches a layer, and one a step that sorts its tokens.

Tokens are sorted by slot on the device, and cut into chunks of one slot each: a long prompt of one request does not
make the grid, and many adapters of one token each are as many small chunks. `shrink` is split along the inputs, since a
decode step's few rows would keep few multiprocessors busy; `expand` adds up the fp32 shares in a fixed order, so there
is no atomic, and adds the product to what the base layer gave. A deferred norm is divided in `shrink`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from app.kernels.gemm import DeferredNorm, Inputs, materialize
from app.kernels.launch import cdiv, early_launch, next_power_of_2
from app.kernels.lora import TILE_RANK, LoraOps, SlotMatrices, SlotRows
from app.kernels.quick_launch import quick_launch

_FEW_TOKENS = 256  # up to so many a chunk has 16 tokens, as in decode steps
_FEW_CHUNK, _MANY_CHUNK = 16, 64
_MOST_SPLITS = 16
_LEAST_DEPTH = 256  # of a split's inputs
_COLUMNS = 128  # outputs of one program
_DEPTH = 128  # inputs that a program reads at a time
_SORT_TOKENS = 64  # tokens that are sorted at a time


@dataclass(slots=True, frozen=True)
class SortedTokens(SlotRows):
    """Tokens in the order of their slots, in chunks; those without a slot come first."""

    order: torch.Tensor  # int32 [T] tokens
    chunks: torch.Tensor  # int32 [3, C]: slot, first place in `order`, how many (0: no chunk)
    chunk_size: int


@quick_launch
@triton.jit(do_not_specialize=["T", "C"])
def sort_kernel(
    p_slots, p_order, p_chunks, T, C,
    G: tl.constexpr, BG: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr, CHUNK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Grid (1,): a stable counting sort of T slots (-1 .. G - 2), and the C chunks of CHUNK tokens."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
    o_g, o_t = tl.arange(0, BG)[None, :], tl.arange(0, BT)
    b_count = tl.zeros([1, BG], dtype=tl.int32)
    for i_t in range(0, T, BT):
        b_group = tl.load(p_slots + i_t + o_t, mask=i_t + o_t < T, other=-2) + 1
        b_count += tl.sum((b_group[:, None] == o_g).to(tl.int32), 0)[None, :]
    b_first = tl.cumsum(b_count, 1) - b_count
    b_at = b_first
    for i_t in range(0, T, BT):
        b_group = tl.load(p_slots + i_t + o_t, mask=i_t + o_t < T, other=-2) + 1
        b_is = (b_group[:, None] == o_g).to(tl.int32)
        b_place = tl.sum(b_is * (b_at + tl.cumsum(b_is, 0) - 1), 1)
        tl.store(p_order + b_place, (i_t + o_t).to(tl.int32), mask=i_t + o_t < T)
        b_at += tl.sum(b_is, 0)[None, :]
    b_chunks = (b_count + CHUNK - 1) // CHUNK
    b_before = tl.cumsum(b_chunks, 1) - b_chunks
    for i_c in range(0, C, BC):
        o_c = i_c + tl.arange(0, BC)
        b_nth = o_c[:, None] - b_before
        b_is = ((b_nth >= 0) & (b_nth < b_chunks)).to(tl.int32)
        b_begin = tl.sum(b_is * (b_first + b_nth * CHUNK), 1)
        b_size = tl.sum(b_is * tl.minimum(b_count - b_nth * CHUNK, CHUNK), 1)
        tl.store(p_chunks + o_c, tl.sum(b_is * o_g, 1) - 1, mask=o_c < C)
        tl.store(p_chunks + C + o_c, b_begin, mask=o_c < C)
        tl.store(p_chunks + 2 * C + o_c, b_size, mask=o_c < C)


@quick_launch
@triton.jit(do_not_specialize=["T", "C"])
def shrink_kernel(
    p_x, p_squares, p_first, p_num_tiles, p_order, p_chunks, p_shares, T, C, K, eps, stride_x, stride_slot, stride_tile,
    P: tl.constexpr, Q: tl.constexpr, BQ: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, BR: tl.constexpr,
    SPLITS: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Grid (C, SPLITS, tiles * P): p_shares [SPLITS, T, tiles * P, BR], the split's share of x first^T, by place in the
    order. p_squares [T, Q]: x is divided by its rows' RMS."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
    i_c, i_split, i_p = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    b_slot = tl.load(p_chunks + i_c).to(tl.int64)
    b_size = tl.load(p_chunks + 2 * C + i_c)
    if (b_slot < 0) | (b_size == 0):
        return
    i_tile = i_p // P
    if i_tile >= tl.load(p_num_tiles + b_slot):
        return
    o_m = tl.arange(0, BM)
    m_m = o_m < b_size
    o_place = tl.load(p_chunks + C + i_c) + o_m
    o_token = tl.load(p_order + o_place, mask=m_m, other=0).to(tl.int64)
    depth = tl.multiple_of(K // SPLITS, BK) if EVEN else K
    o_k, o_r = i_split * depth + tl.arange(0, BK), tl.arange(0, BR)
    p_rows = p_x + o_token[:, None] * stride_x + o_k[None, :]
    p_a = p_first + b_slot * stride_slot + i_tile.to(tl.int64) * stride_tile
    p_a += (i_p % P) * BR * K + o_r[:, None] * K + o_k[None, :]
    if p_squares is not None:
        o_q = tl.arange(0, BQ)[None, :]
        b_squares = tl.load(p_squares + o_token[:, None] * Q + o_q, mask=m_m[:, None] & (o_q < Q), other=0.0)
    b_acc = tl.zeros([BM, BR], dtype=tl.float32)
    for i_k in range(0, depth, BK):
        if EVEN:
            b_x = tl.load(p_rows + i_k, mask=m_m[:, None], other=0.0)
            b_a = tl.load(p_a + i_k)
        else:
            m_k = o_k[None, :] + i_k < K
            b_x = tl.load(p_rows + i_k, mask=m_m[:, None] & m_k, other=0.0)
            b_a = tl.load(p_a + i_k, mask=m_k, other=0.0)
        b_acc = tl.dot(b_x, tl.trans(b_a), b_acc, input_precision=PRECISION)
    if p_squares is not None:
        b_acc *= tl.rsqrt(tl.sum(b_squares, 1)[:, None] / K + eps)
    o_share = ((i_split * T + o_place[:, None]).to(tl.int64) * tl.num_programs(2) + i_p) * BR + o_r[None, :]
    tl.store(p_shares + o_share, b_acc, mask=m_m[:, None])


@quick_launch
@triton.jit(do_not_specialize=["T", "C"])
def expand_kernel(
    p_y, p_second, p_num_tiles, p_order, p_chunks, p_shares, p_part_tiles, p_out, T, C, stride_y, stride_out,
    stride_slot, stride_tile,
    P: tl.constexpr, TILES: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BR: tl.constexpr, SPLITS: tl.constexpr,
    COPIES: tl.constexpr, PRECISION: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Grid (C, pieces of the outputs): p_out = p_y + shares second^T. COPIES: p_out is not p_y, so what has no slot is
    copied."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
    i_c, i_n = tl.program_id(0), tl.program_id(1)
    b_slot = tl.load(p_chunks + i_c).to(tl.int64)
    b_size = tl.load(p_chunks + 2 * C + i_c)
    if b_size == 0:
        return
    if not COPIES:  # noqa: SIM102 (a branch of the compiler's around one of the device's)
        if b_slot < 0:
            return
    o_m = tl.arange(0, BM)
    o_place = tl.load(p_chunks + C + i_c) + o_m
    o_token = tl.load(p_order + o_place, mask=o_m < b_size, other=0).to(tl.int64)
    o_n = tl.load(p_part_tiles + 3 * i_n) + tl.arange(0, BN)
    m_n = o_n < tl.load(p_part_tiles + 3 * i_n + 1)
    m = (o_m[:, None] < b_size) & m_n[None, :]
    b_y = tl.load(p_y + o_token[:, None] * stride_y + o_n[None, :], mask=m, other=0.0)
    b_acc = b_y.to(tl.float32)
    if b_slot >= 0:
        b_part = tl.load(p_part_tiles + 3 * i_n + 2)
        o_r = tl.arange(0, BR)
        p_b = p_second + b_slot * stride_slot + o_n[:, None] * BR + o_r[None, :]
        o_share = (o_place[:, None].to(tl.int64) * (TILES * P) + b_part) * BR + o_r[None, :]
        size = T.to(tl.int64) * (TILES * P * BR)
        for _ in range(0, tl.load(p_num_tiles + b_slot)):
            b_h = tl.zeros([BM, BR], dtype=tl.float32)
            for i_split in tl.static_range(0, SPLITS):
                b_h += tl.load(p_shares + i_split * size + o_share, mask=o_m[:, None] < b_size, other=0.0)
            b_b = tl.load(p_b, mask=m_n[:, None], other=0.0)
            b_acc = tl.dot(b_h.to(b_b.dtype), tl.trans(b_b), b_acc, input_precision=PRECISION)
            p_b += stride_tile
            o_share += P * BR
    tl.store(p_out + o_token[:, None] * stride_out + o_n[None, :], b_acc.to(p_out.dtype.element_ty), mask=m)


def rows_by_slot(slots: torch.Tensor, num_slots: int) -> SortedTokens:
    """See RowsBySlot."""
    num_tokens, groups = len(slots), num_slots + 1
    chunk = _FEW_CHUNK if num_tokens <= _FEW_TOKENS else _MANY_CHUNK
    num_chunks = min(num_tokens, num_tokens // chunk + groups)
    order = torch.empty(num_tokens, dtype=torch.int32, device=slots.device)
    chunks = torch.empty(3, num_chunks, dtype=torch.int32, device=slots.device)
    sort_kernel[(1,)](
        slots, order, chunks, num_tokens, num_chunks,
        G=groups, BG=next_power_of_2(groups), BT=_SORT_TOKENS, BC=32, CHUNK=chunk, num_warps=4,
        **early_launch(slots.device),
    )  # fmt: skip
    return SortedTokens(order, chunks, chunk)


def add_products(x: Inputs, matrices: SlotMatrices, rows: SlotRows, y: torch.Tensor, *, in_place: bool) -> torch.Tensor:
    """See AddProducts."""
    assert isinstance(rows, SortedTokens)
    assert matrices.part_tiles is not None
    first, second = matrices.first, matrices.second
    x, squares, eps = (x.rows, x.squares, x.eps) if isinstance(x, DeferredNorm) else (materialize(x), None, 0.0)
    assert x.stride(1) == y.stride(1) == 1, "rows must be contiguous"
    _, tiles, parts, _, size = first.shape
    num_tokens, num_chunks = len(x), rows.chunks.shape[1]
    depth, splits = _depth_and_splits(size, num_tokens)
    is_even = size % (depth * splits) == 0
    shares = torch.empty(splits, num_tokens, tiles * parts, TILE_RANK, dtype=torch.float32, device=x.device)
    num_squares = 1 if squares is None else squares.shape[1]
    options = {"PRECISION": "ieee" if x.dtype == torch.float32 else "tf32", **early_launch(x.device)}
    shrink_kernel[(num_chunks, splits, tiles * parts)](
        x, squares, first, matrices.num_tiles, rows.order, rows.chunks, shares, num_tokens, num_chunks, size, eps,
        x.stride(0), first.stride(0), first.stride(1),
        P=parts, Q=num_squares, BQ=next_power_of_2(num_squares), BM=rows.chunk_size, BK=depth, BR=TILE_RANK,
        SPLITS=splits, EVEN=is_even, num_warps=4, num_stages=3, **options,
    )  # fmt: skip
    out = y if in_place else torch.empty_like(y)
    expand_kernel[(num_chunks, len(matrices.part_tiles))](
        y, second, matrices.num_tiles, rows.order, rows.chunks, shares, matrices.part_tiles, out, num_tokens,
        num_chunks, y.stride(0), out.stride(0), second.stride(0), second.stride(1),
        P=parts, TILES=tiles, BM=rows.chunk_size, BN=_COLUMNS, BR=TILE_RANK, SPLITS=splits, COPIES=not in_place,
        num_warps=4, num_stages=2, **options,
    )  # fmt: skip
    return out


def _depth_and_splits(size: int, num_tokens: int) -> tuple[int, int]:
    """Inputs that a program reads at a time, and parts that all of them are cut into: many chunks are enough."""
    depth = _DEPTH
    while depth > TILE_RANK and size % depth:
        depth //= 2
    splits, most = 1, _MOST_SPLITS if num_tokens <= _FEW_TOKENS else 1
    while splits < most and size % (2 * splits * depth) == 0 and size >= 2 * splits * _LEAST_DEPTH:
        splits *= 2
    return depth, splits


def part_tiles(part_sizes: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Pieces of _COLUMNS outputs, none across two parts."""
    pieces, start = [], 0
    for part, size in enumerate(part_sizes):
        for number in range(cdiv(size, _COLUMNS)):
            begin = start + number * _COLUMNS
            pieces.append((begin, min(begin + _COLUMNS, start + size), part))
        start += size
    return torch.tensor(pieces, dtype=torch.int32, device=device)


OPS = LoraOps(rows_by_slot, add_products, part_tiles)
