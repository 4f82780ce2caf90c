# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Paged attention on a GPU whose result for a token depends on its own request's tokens before it alone, to the bit.

Keys come in tiles of `KEYS` and splits of `SPLIT_KEYS`, which begin at multiples of absolute positions. Each split is
attended from nothing, and splits are folded into the result from the first to the last, whether one program attends
all of them (where there are many queries) or several share them out and another folds what they left. A row of scores
lies in one warp, whose threads add it up in one order for any number of rows; keys that a token does not see weigh
exactly 0 and change no sum. So neither a token's place among others nor what was cached before it matters.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from app.kernels.attention import AttentionMetadata, AttentionOps, AttentionOptions, HeadBias
from app.kernels.attention.triton_ops import check_sizes, write_kv
from app.kernels.attention.triton_tile import NO_MAX, attend_tile, head_columns
from app.kernels.launch import cdiv, early_launch, next_power_of_2
from app.kernels.quick_launch import quick_launch

KEYS = 64  # positions of a tile
SPLIT_KEYS = 512  # of a split
_FEW_PROGRAMS = 264  # with fewer, several share a request's splits: two for each multiprocessor of an H200
_FOLDED = 4  # splits whose results are on their way at a time


@dataclass(slots=True, frozen=True)
class RowTile:
    """(token, query head) pairs of a program, and its launch options."""

    rows: int
    num_warps: int  # each has 16 rows, or 32


FEW_ROWS = RowTile(64, 4)
MANY_ROWS = RowTile(128, 8)


@triton.jit
def fold(b_total, b_sum, b_max, b_acc, b_part_sum, b_part_max):
    """(b_total, b_sum, b_max) of the splits before, with one split more: (b_acc, b_part_sum, b_part_max). Products and
    sums are rounded as they stand here, however a compiler would join them."""
    b_new_max = tl.maximum(b_max, b_part_max)
    b_before, b_now = tl.exp2(b_max - b_new_max), tl.exp2(b_part_max - b_new_max)
    b_weight = tl.broadcast_to(b_now[:, None], b_acc.shape)
    b_total = tl.fma(b_acc, b_weight, b_total * b_before[:, None])
    return b_total, tl.fma(b_part_sum, b_now, b_sum * b_before), b_new_max


@quick_launch
@triton.jit(do_not_specialize=["window", "first_request", "shares", "num_splits", "stride_table"])
def fixed_attention_kernel(
    p_q, p_cache, p_out, p_partial, p_sums, p_maxima, p_tables, p_query_start_loc, p_seq_lens, scale, soft_cap,
    window, first_request, shares, num_splits, stride_q_token, stride_q_head, stride_out_token, stride_out_head,
    stride_block, stride_value, stride_head, stride_slot, stride_table,
    G: tl.constexpr, HQ: tl.constexpr, D: tl.constexpr, S: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BD: tl.constexpr, SPLIT: tl.constexpr, USE_WINDOW: tl.constexpr, USE_CAP: tl.constexpr,
    PRECISION: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of the longest query, Hkv, requests from first_request on * shares). With p_out a program attends all
    splits; else one in `shares`, and leaves what each gave: p_partial fp32 [T, HQ, num_splits, D], p_sums and p_maxima
    fp32 [T, HQ, num_splits]."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
    BQ: tl.constexpr = BM // G  # tokens of a tile
    i_head = tl.program_id(1)
    i_r, i_share = first_request + tl.program_id(2) // shares, tl.program_id(2) % shares
    b_start = tl.load(p_query_start_loc + i_r)
    b_num_query = tl.load(p_query_start_loc + i_r + 1) - b_start
    i_q = tl.cdiv(b_num_query, BQ) - 1 - tl.program_id(0)  # the last tiles, which see most, first
    if i_q < 0:
        return
    b_len = tl.load(p_seq_lens + i_r)
    o_m, o_d = tl.arange(0, BM), tl.arange(0, BD)
    o_token = i_q * BQ + o_m // G
    m_m = (o_m < BQ * G) & (o_token < b_num_query)
    m_q = m_m[:, None] & (o_d[None, :] < D)
    o_row = (b_start + o_token).to(tl.int64)
    o_head = i_head * G + o_m % G
    b_q = tl.load(p_q + (o_row * stride_q_token + o_head * stride_q_head)[:, None] + o_d[None, :], mask=m_q, other=0.0)
    p_head = p_cache + i_head * stride_head
    p_table = p_tables + i_r.to(tl.int64) * stride_table
    first_pos = b_len - b_num_query + i_q * BQ
    o_pos = b_len - b_num_query + o_token
    hi = tl.minimum(first_pos + BQ, b_len)
    lo = 0
    if USE_WINDOW:
        lo = tl.maximum(first_pos - window + 1, 0)
    b_total = tl.zeros([BM, BD], dtype=tl.float32)
    b_sum = tl.zeros([BM], dtype=tl.float32)
    b_max = tl.zeros([BM], dtype=tl.float32) + NO_MAX
    first_split = lo // SPLIT
    for i_split in range(first_split + i_share, tl.cdiv(hi, SPLIT), shares):
        b_acc = tl.zeros([BM, BD], dtype=tl.float32)
        b_part_sum = tl.zeros([BM], dtype=tl.float32)
        b_part_max = tl.zeros([BM], dtype=tl.float32) + NO_MAX
        begin = tl.maximum(i_split * SPLIT, lo // BN * BN)
        end = tl.minimum(i_split * SPLIT + SPLIT, hi)
        middle = begin  # up to here keys are seen by all of the tile
        if not USE_WINDOW:
            middle = tl.minimum(tl.maximum((first_pos + 1) // BN * BN, begin), end // BN * BN)
            for i_n in range(begin, middle, BN):
                b_acc, b_part_sum, b_part_max = attend_tile(
                    b_q, b_acc, b_part_sum, b_part_max, p_head, p_table, i_n, lo, hi, o_pos, scale, soft_cap, window,
                    None, None, 0, stride_block, stride_value, stride_slot, D, S, BN, BD, False, False, USE_CAP,
                    PRECISION,
                )  # fmt: skip
        for i_n in range(middle, end, BN):
            b_acc, b_part_sum, b_part_max = attend_tile(
                b_q, b_acc, b_part_sum, b_part_max, p_head, p_table, i_n, lo, hi, o_pos, scale, soft_cap, window,
                None, None, 0, stride_block, stride_value, stride_slot, D, S, BN, BD, True, USE_WINDOW, USE_CAP,
                PRECISION,
            )  # fmt: skip
        if p_out is not None:
            b_total, b_sum, b_max = fold(b_total, b_sum, b_max, b_acc, b_part_sum, b_part_max)
        else:
            o_part = (o_row * HQ + o_head) * num_splits + i_split
            tl.store(p_partial + o_part[:, None] * D + o_d[None, :], b_acc, mask=m_q)
            tl.store(p_sums + o_part, b_part_sum, mask=m_m)
            tl.store(p_maxima + o_part, b_part_max, mask=m_m)
    if p_out is not None:
        p_o = p_out + (o_row * stride_out_token + o_head * stride_out_head)[:, None] + o_d[None, :]
        tl.store(p_o, (b_total / b_sum[:, None]).to(p_out.dtype.element_ty), mask=m_q)


@quick_launch
@triton.jit(do_not_specialize=["window", "num_splits"])
def fold_splits_kernel(
    p_partial, p_sums, p_maxima, p_out, p_query_start_loc, p_seq_lens, window, num_splits, stride_out_token,
    stride_out_head,
    HQ: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, SPLIT: tl.constexpr, FOLDED: tl.constexpr,
    USE_WINDOW: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Grid (tokens of the longest query, HQ, requests): the splits that a token sees, from the first to the last."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
    i_token, i_head, i_r = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    b_start = tl.load(p_query_start_loc + i_r)
    b_num_query = tl.load(p_query_start_loc + i_r + 1) - b_start
    if i_token >= b_num_query:
        return
    i_pos = tl.load(p_seq_lens + i_r) - b_num_query + i_token
    lo = 0
    if USE_WINDOW:
        lo = tl.maximum(i_pos - window + 1, 0)
    o_d = tl.arange(0, BD)[None, :]
    i_row = (b_start + i_token).to(tl.int64)
    o_first = (i_row * HQ + i_head) * num_splits
    b_total = tl.zeros([1, BD], dtype=tl.float32)
    b_sum = tl.zeros([1], dtype=tl.float32)
    b_max = tl.zeros([1], dtype=tl.float32) + NO_MAX
    last = i_pos // SPLIT
    for i_first in range(lo // SPLIT, last + 1, FOLDED):
        for i in tl.static_range(FOLDED):
            o_split = i_first + i + tl.arange(0, 1)
            m = o_split <= last
            b_acc = tl.load(
                p_partial + (o_first + o_split)[:, None] * D + o_d, mask=m[:, None] & (o_d < D), other=0.0
            )  # fmt: skip
            b_part_sum = tl.load(p_sums + o_first + o_split, mask=m, other=0.0)
            b_part_max = tl.load(p_maxima + o_first + o_split, mask=m, other=NO_MAX)
            b_total, b_sum, b_max = fold(b_total, b_sum, b_max, b_acc, b_part_sum, b_part_max)
    p_o = p_out + i_row * stride_out_token + i_head * stride_out_head + o_d
    tl.store(p_o, (b_total / b_sum[:, None]).to(p_out.dtype.element_ty), mask=o_d < D)


@dataclass(slots=True, frozen=True)
class FixedPlan:
    """Says how a step is parted: its first requests bring few tokens."""

    num_few: int
    few_tokens: int  # rows of theirs, the first ones of the step
    longest_few: int  # tokens of one of them
    num_splits: int  # of the longest context


def prepare(meta: AttentionMetadata, *, num_heads: int, num_kv_heads: int, head_dim: int, block_size: int) -> None:
    """Set meta.plan. ConfigError where the kernels cannot serve the shape."""
    check_sizes(num_heads, num_kv_heads, head_dim, block_size)
    num_splits = cdiv(meta.max_seq_len, SPLIT_KEYS)
    if meta.max_query_len * (num_heads // num_kv_heads) <= FEW_ROWS.rows:
        few = (meta.seq_lens.shape[0], meta.slot_mapping.shape[0], meta.max_query_len)
    else:
        few = (meta.num_decodes, meta.num_decodes, 1)
    meta.plan = FixedPlan(*few, num_splits)


def paged_attention(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    meta: AttentionMetadata,
    *,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    kv_scales: torch.Tensor | None = None,
    bias: HeadBias | None = None,
) -> torch.Tensor:
    """Attention of query [T, Hq, D] over kv_cache [B, 2, Hkv, S, D]; arguments as in `naive_paged_attention`."""
    plan = meta.plan
    assert isinstance(plan, FixedPlan), "call prepare(meta, ...) before the first layer"
    assert (kv_scales, bias) == (None, None), "it serves none of these (OPS.features)"
    assert query.stride(2) == kv_cache.stride(4) == 1, "head vectors must be contiguous"
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    num_kv_heads, num_requests = kv_cache.shape[2], meta.seq_lens.shape[0]
    options = AttentionOptions(scale, sliding_window, soft_cap)
    if plan.num_few > 0:
        shares = max(1, min(plan.num_splits, _FEW_PROGRAMS // (plan.num_few * num_kv_heads)))
        few = _Part(slice(0, plan.num_few), plan.longest_few, FEW_ROWS, plan.few_tokens, shares)
        _attend(query, kv_cache, meta, out, options, few)
    if plan.num_few < num_requests:
        many = _Part(slice(plan.num_few, num_requests), meta.max_query_len, MANY_ROWS)
        _attend(query, kv_cache, meta, out, options, many)
    return out


@dataclass(slots=True, frozen=True)
class _Part:
    """Some requests of a step, and how they are attended."""

    requests: slice
    longest: int  # tokens of one of them
    tile: RowTile
    num_tokens: int = 0  # of all of them, the step's first ones, where several programs share a request
    shares: int = 1  # programs that share a request's splits


def _attend(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    meta: AttentionMetadata,
    out: torch.Tensor,
    options: AttentionOptions,
    part: _Part,
) -> None:
    """Write the rows of out [T, Hq, D] of a part's requests."""
    (num_heads, head_dim), (num_kv_heads, block_size) = query.shape[1:], kv_cache.shape[2:4]
    group, num_splits = num_heads // num_kv_heads, cdiv(meta.max_seq_len, SPLIT_KEYS)
    num_rows = max(part.tile.rows, next_power_of_2(group))
    num_requests, window = part.requests.stop - part.requests.start, options.sliding_window
    partial = sums = maxima = None
    if part.shares > 1:
        shape = (part.num_tokens, num_heads, num_splits)
        partial = torch.empty(*shape, head_dim, dtype=torch.float32, device=query.device)
        sums, maxima = (torch.empty(shape, dtype=torch.float32, device=query.device) for _ in range(2))
    sizes = {
        "HQ": num_heads, "D": head_dim, "BD": head_columns(head_dim), "SPLIT": SPLIT_KEYS,
        "USE_WINDOW": window is not None, **early_launch(query.device),
    }  # fmt: skip
    grid = (cdiv(part.longest, num_rows // group), num_kv_heads, num_requests * part.shares)
    fixed_attention_kernel[grid](
        query, kv_cache, out if partial is None else None, partial, sums, maxima, meta.block_table,
        meta.query_start_loc, meta.seq_lens, options.scale, options.soft_cap or 1.0, window or 0, part.requests.start,
        part.shares, num_splits, query.stride(0), query.stride(1), out.stride(0), out.stride(1), *kv_cache.stride()[:4],
        meta.block_table.stride(0), G=group, S=block_size, BM=num_rows, BN=KEYS,
        USE_CAP=options.soft_cap is not None, PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
        num_warps=part.tile.num_warps, num_stages=2, **sizes,
    )  # fmt: skip
    if partial is not None:
        fold_splits_kernel[(part.longest, num_heads, num_requests)](
            partial, sums, maxima, out, meta.query_start_loc, meta.seq_lens, window or 0, num_splits, out.stride(0),
            out.stride(1), FOLDED=_FOLDED, num_warps=1, **sizes,
        )  # fmt: skip


OPS = AttentionOps(
    prepare=prepare,
    write_kv=write_kv,
    paged_attention=paged_attention,
    is_capturable=True,
    features=frozenset({"sliding_window", "soft_cap"}),
    is_exact=True,
    name="triton_exact",
)
