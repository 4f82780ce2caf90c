# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Prefill over tensor descriptors: keys and values travel by the GPU's copy engine (TMA), not by the threads.

The same arithmetic as triton_prefill.py. A descriptor copies rows that lie together, so a tile of keys must lie
within one block: blocks of at least `keys` slots are read in place, smaller ones are first gathered into a scratch
cache whose one block per request holds its whole context (a copy of what attention reads anyway many times).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from app.kernels.attention import AttentionMetadata
from app.kernels.attention.triton_prefill import PrefillTile
from app.kernels.attention.triton_tile import LOG2_E, NO_MAX, cap_scores

MAX_SCRATCH_BYTES = 1 << 28
DEFAULT_TILE = PrefillTile(rows=128, keys=64, num_warps=8, num_stages=3)


@triton.jit
def fold_tile(
    b_q, b_k, b_v, b_acc, b_sum, b_max, i_n, lo, hi, o_pos, scale, soft_cap, window,
    BN: tl.constexpr, MASKED: tl.constexpr, USE_WINDOW: tl.constexpr, USE_CAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Fold keys and values [BN, D] of positions [i_n, i_n + BN) into (b_acc, b_sum, b_max): see `attend_tile`."""
    b_s = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)
    factor = scale * LOG2_E
    if USE_CAP:
        b_s = cap_scores(b_s * scale, soft_cap)
        factor = LOG2_E
    if MASKED:
        o_n = i_n + tl.arange(0, BN)
        m_n = (o_n >= lo) & (o_n < hi)
        m_s = (o_n[None, :] <= o_pos[:, None]) & m_n[None, :]
        if USE_WINDOW:
            m_s = m_s & (o_n[None, :] > o_pos[:, None] - window)
        b_s = tl.where(m_s, b_s, float("-inf"))
        b_v = tl.where(m_n[:, None], b_v, 0.0).to(b_v.dtype)  # a slot nobody wrote may hold NaN
    b_new_max = tl.maximum(b_max, tl.max(b_s, 1) * factor)
    b_scale = tl.exp2(b_max - b_new_max)
    b_p = tl.exp2(b_s * factor - b_new_max[:, None])
    b_sum = b_sum * b_scale + tl.sum(b_p, 1)
    b_acc = tl.dot(b_p.to(b_v.dtype), b_v, b_acc * b_scale[:, None], input_precision=PRECISION)
    return b_acc, b_sum, b_new_max


@triton.jit(do_not_specialize=["window", "first_request", "first_table", "stride_table"])
def prefill_descriptor_kernel(
    desc_kv, p_q, p_out, p_tables, p_query_start_loc, p_seq_lens, scale, soft_cap, window, first_request, first_table,
    stride_q_token, stride_q_head, stride_out_token, stride_out_head, stride_table, S,
    G: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    USE_WINDOW: tl.constexpr, USE_CAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of the longest query, Hkv, requests from first_request on). `desc_kv` sees the cache as rows
    [B * 2 * HKV * S, D]; the table's row of request r is first_table + r - first_request."""
    BQ: tl.constexpr = BM // G  # tokens of a tile
    i_head = tl.program_id(1)
    i_r = first_request + tl.program_id(2)
    b_start = tl.load(p_query_start_loc + i_r)
    b_num_query = tl.load(p_query_start_loc + i_r + 1) - b_start
    i_q = tl.cdiv(b_num_query, BQ) - 1 - tl.program_id(0)
    if i_q < 0:
        return
    b_len = tl.load(p_seq_lens + i_r)
    o_m, o_d = tl.arange(0, BM), tl.arange(0, D)
    o_token = i_q * BQ + o_m // G
    m_q = ((o_m < BQ * G) & (o_token < b_num_query))[:, None]
    o_row = (b_start + o_token).to(tl.int64)
    o_head = i_head * G + o_m % G
    b_q = tl.load(p_q + (o_row * stride_q_token + o_head * stride_q_head)[:, None] + o_d[None, :], mask=m_q, other=0.0)
    b_acc = tl.zeros([BM, D], dtype=tl.float32)
    b_sum = tl.zeros([BM], dtype=tl.float32)
    b_max = tl.zeros([BM], dtype=tl.float32) + NO_MAX
    p_table = p_tables + (first_table + tl.program_id(2)).to(tl.int64) * stride_table
    first_pos = b_len - b_num_query + i_q * BQ
    o_pos = b_len - b_num_query + o_token
    hi = tl.minimum(first_pos + BQ, b_len)
    lo = 0
    i_masked = (first_pos + 1) // BN * BN  # keys before it are seen by all of the tile
    if USE_WINDOW:
        lo = tl.maximum(first_pos - window + 1, 0)
        i_masked = lo // BN * BN
    else:
        for i_n in range(0, i_masked, BN):
            i_row = (tl.load(p_table + i_n // S) * (2 * HKV) + i_head) * S + i_n % S
            b_k, b_v = desc_kv.load([i_row, 0]), desc_kv.load([i_row + HKV * S, 0])
            b_acc, b_sum, b_max = fold_tile(
                b_q, b_k, b_v, b_acc, b_sum, b_max, i_n, lo, hi, o_pos, scale, soft_cap, window,
                BN, False, False, USE_CAP, PRECISION,
            )  # fmt: skip
    for i_n in range(i_masked, hi, BN):
        i_row = (tl.load(p_table + i_n // S) * (2 * HKV) + i_head) * S + i_n % S
        b_k, b_v = desc_kv.load([i_row, 0]), desc_kv.load([i_row + HKV * S, 0])
        b_acc, b_sum, b_max = fold_tile(
            b_q, b_k, b_v, b_acc, b_sum, b_max, i_n, lo, hi, o_pos, scale, soft_cap, window,
            BN, True, USE_WINDOW, USE_CAP, PRECISION,
        )  # fmt: skip
    b_out = (b_acc / b_sum[:, None]).to(p_out.dtype.element_ty)
    tl.store(p_out + (o_row * stride_out_token + o_head * stride_out_head)[:, None] + o_d[None, :], b_out, mask=m_q)


@triton.jit(do_not_specialize=["first_request", "stride_table", "length"])
def gather_context_kernel(
    p_cache, p_out, p_tables, p_seq_lens, first_request, stride_table, stride_block, stride_half, length,
    S: tl.constexpr, D: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of the longest context, 2 * Hkv, requests): one block's keys (or values) of one head. Slots past a
    request's length become 0."""
    i_block, i_half, i_r = tl.program_id(0), tl.program_id(1), first_request + tl.program_id(2)
    o_s = tl.arange(0, S)[:, None]
    o_d = tl.arange(0, BD)[None, :]
    m_in = (i_block * S + o_s < tl.load(p_seq_lens + i_r)) & (o_d < D)
    b_block = tl.load(p_tables + i_r.to(tl.int64) * stride_table + i_block).to(tl.int64)
    b_x = tl.load(p_cache + b_block * stride_block + i_half * stride_half + o_s * D + o_d, mask=m_in, other=0.0)
    o_out = (tl.program_id(2).to(tl.int64) * tl.num_programs(1) + i_half) * length + i_block * S + o_s
    tl.store(p_out + o_out * D + o_d, b_x, mask=(i_block * S + o_s < length) & (o_d < D))


def gather_context(kv_cache: torch.Tensor, meta: AttentionMetadata, multiple: int) -> torch.Tensor:
    """Contexts of the requests from num_decodes on, [requests, 2, Hkv, length, D]: length is max_seq_len rounded up
    to a multiple, slots past a request's own length are 0."""
    _, _, num_kv_heads, block_size, head_dim = kv_cache.shape
    assert kv_cache.is_contiguous(), "blocks must be contiguous"
    num_requests = meta.seq_lens.shape[0] - meta.num_decodes
    length = triton.cdiv(meta.max_seq_len, multiple) * multiple
    out = torch.empty(num_requests, 2, num_kv_heads, length, head_dim, dtype=kv_cache.dtype, device=kv_cache.device)
    # The table may have no entry for the last, padded blocks; they lie past every length.
    num_blocks = min(triton.cdiv(length, block_size), meta.block_table.shape[1])
    if num_blocks * block_size < length:
        out[:, :, :, num_blocks * block_size :].zero_()
    gather_context_kernel[(num_blocks, 2 * num_kv_heads, num_requests)](
        kv_cache, out, meta.block_table, meta.seq_lens, meta.num_decodes, meta.block_table.stride(0),
        kv_cache.stride(0), kv_cache.stride(2), length,
        S=block_size, D=head_dim, BD=triton.next_power_of_2(head_dim), num_warps=4,
    )  # fmt: skip
    return out


def serves(
    query: torch.Tensor, kv_cache: torch.Tensor, meta: AttentionMetadata, tile: PrefillTile = DEFAULT_TILE
) -> bool:
    """Whether the shapes suit descriptors, and a scratch cache (where one is needed) is small enough."""
    head_dim, block_size = query.shape[2], kv_cache.shape[3]
    if kv_cache.dtype != query.dtype:
        return False  # a quantized cache
    if head_dim & (head_dim - 1) or not 16 <= head_dim <= 256 or not kv_cache.is_contiguous():
        return False
    if block_size % tile.keys == 0:
        return True
    num_requests = meta.seq_lens.shape[0] - meta.num_decodes
    per_token = kv_cache[0].numel() // block_size * kv_cache.element_size()
    return num_requests * meta.max_seq_len * per_token <= MAX_SCRATCH_BYTES


def prefill(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    meta: AttentionMetadata,
    out: torch.Tensor,
    *,
    scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
    tile: PrefillTile = DEFAULT_TILE,
) -> None:
    """As `triton_prefill.prefill`, where `serves` agrees."""
    num_heads, head_dim = query.shape[1:]
    num_kv_heads = kv_cache.shape[2]
    group = num_heads // num_kv_heads
    num_rows = max(tile.rows, triton.next_power_of_2(group))
    num_requests = meta.seq_lens.shape[0] - meta.num_decodes
    tables, first_table = meta.block_table, meta.num_decodes
    if kv_cache.shape[3] % tile.keys:
        kv_cache = gather_context(kv_cache, meta, tile.keys)
        tables, first_table = torch.arange(num_requests, dtype=torch.int32, device=query.device)[:, None], 0
    rows = kv_cache.view(-1, head_dim)
    descriptor = TensorDescriptor(rows, list(rows.shape), list(rows.stride()), [tile.keys, head_dim])
    prefill_descriptor_kernel[(triton.cdiv(meta.max_query_len, num_rows // group), num_kv_heads, num_requests)](
        descriptor, query, out, tables, meta.query_start_loc, meta.seq_lens, scale, soft_cap or 1.0,
        sliding_window or 0, meta.num_decodes, first_table, query.stride(0), query.stride(1), out.stride(0),
        out.stride(1), tables.stride(0), kv_cache.shape[3],
        G=group, HKV=num_kv_heads, D=head_dim, BM=num_rows, BN=tile.keys, USE_WINDOW=sliding_window is not None,
        USE_CAP=soft_cap is not None, PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
