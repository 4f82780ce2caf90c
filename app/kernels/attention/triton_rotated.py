# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""The decode of a lone request in one launch: queries and keys are normed and rotated, keys and values written, and all
heads attend.

A launch costs as much as its work where requests are few: of more than one the two launches are as fast. Here a program
has one KV head's query heads and one split of a context, as in `triton_decode`, but splits are small: a tile of keys
each, while all programs have room on the GPU at once. Keys and values of earlier tokens are in the cache before the
launch before, which projects this token's, so they are on their way before it has ended. This token's own come from
that launch's rows: each program rotates its queries, and whoever has the last split also the key, which it attends to
as it is stored, and stores.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from app.kernels.attention import AttentionMetadata, AttentionOptions, HeadNorm
from app.kernels.attention.triton_merge import done_before, merge_splits
from app.kernels.attention.triton_splits import MAX_SPLITS, cut_context
from app.kernels.attention.triton_tile import LOG2_E, NO_MAX, attend_tile, score_tile, tile_offsets, weight_of_sink
from app.kernels.launch import cdiv, early_launch, next_power_of_2
from app.kernels.quick_launch import quick_launch

MOST_TOKENS = 1
TILE_BYTES = 16_384  # of keys, and as many of values: what a program has on its way
_MERGE_ELEMENTS = 8192  # of partial results that are on their way at a time
LONGEST = 16_384  # tokens that a context may have: with more, programs of fewer registers read more at a time
_PROGRAMS = 264  # at a time: two on each multiprocessor, which is what their registers allow
_HEAD_DIMS = (64, 128)
_DTYPES = (torch.bfloat16, torch.float16)
RotatedScratch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # partial, log_sum, arrived


@triton.jit
def rotated(p_row, p_weight, p_cos, p_sin, o_d, m, eps, D: tl.constexpr, DR: tl.constexpr, USE_NORM: tl.constexpr):
    """fp32 like p_row + o_d: heads, normed and rotated."""
    b_x = tl.load(p_row + o_d, mask=m, other=0.0).to(tl.float32)
    o_other = tl.where(o_d < DR // 2, o_d + DR // 2, o_d - DR // 2)
    m_angle = o_d < DR
    b_other = tl.load(p_row + o_other, mask=m & m_angle, other=0.0).to(tl.float32)
    if USE_NORM:
        b_rms = tl.rsqrt(tl.sum(b_x * b_x, 1)[:, None] / D + eps)
        b_x = b_x * b_rms * tl.load(p_weight + o_d).to(tl.float32)
        b_other = b_other * b_rms * tl.load(p_weight + o_other, mask=m_angle, other=0.0).to(tl.float32)
    b_cos = tl.load(p_cos + o_d, mask=m_angle, other=1.0).to(tl.float32)
    b_sin = tl.load(p_sin + o_d, mask=m_angle, other=0.0).to(tl.float32)
    return b_x * b_cos + b_other * b_sin


@quick_launch
@triton.jit(do_not_specialize=["window", "stride_table"])
def rotated_decode_kernel(
    p_heads, p_cos, p_sin, p_query_weight, p_key_weight, p_cache, p_sinks, p_slots, p_out, p_partial, p_log_sum,
    p_arrived, p_tables, p_seq_lens, eps, scale, window,
    stride_heads_token, stride_heads_head, stride_angle, stride_block, stride_value, stride_head, stride_slot,
    stride_table,
    HKV: tl.constexpr, G: tl.constexpr, BG: tl.constexpr, D: tl.constexpr, DR: tl.constexpr, S: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BS: tl.constexpr, MAX_SPLITS: tl.constexpr, USE_WINDOW: tl.constexpr,
    USE_NORM: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Grid (Hkv, splits of the longest request, requests). p_partial fp32 [R, Hq, MAX_SPLITS, D], p_log_sum fp32
    [R, Hq, MAX_SPLITS]; p_arrived int32 [R, Hkv] is zero before and after."""
    i_head, i_split, i_r = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    b_len = tl.load(p_seq_lens + i_r)
    lo, start, split = cut_context(b_len, window, BN, USE_WINDOW, MAX_SPLITS, BN)
    begin = start + i_split * split
    if begin >= b_len:
        # Without a wait: the next kernel begins once all programs have let it or ended, and those of the first split,
        # which every context has, let it only after their wait.
        return
    end = tl.minimum(begin + split, b_len)
    num_splits = tl.cdiv(b_len - start, split)
    hi = tl.minimum(end, b_len - 1)  # of the keys that were there before
    o_m, o_d = tl.arange(0, BM)[:, None], tl.arange(0, D)[None, :]
    m_q = (o_m < G) & (o_d < D)
    p_head = p_cache + i_head * stride_head
    p_table = p_tables + i_r.to(tl.int64) * stride_table
    o_n = begin + tl.arange(0, BN)
    m_n = (o_n >= lo) & (o_n < hi)
    o_kv = tile_offsets(p_table, begin, o_n, m_n, stride_block, stride_slot, S, BN)
    p_k = p_head + o_kv[:, None] + o_d
    b_k = tl.load(p_k, mask=m_n[:, None], other=0.0)
    b_v = tl.load(p_k + stride_value, mask=m_n[:, None], other=0.0)
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    p_row = p_heads + i_r.to(tl.int64) * stride_heads_token
    p_own_cos, p_own_sin = p_cos + i_r * stride_angle, p_sin + i_r * stride_angle
    p_query = p_row + (i_head * G + o_m) * stride_heads_head
    p_key = p_row + (HKV * G + i_head + o_m * 0) * stride_heads_head
    DTYPE: tl.constexpr = p_out.dtype.element_ty
    b_q = rotated(p_query, p_query_weight, p_own_cos, p_own_sin, o_d, m_q, eps, D, DR, USE_NORM).to(DTYPE)
    b_max = tl.zeros([BM], dtype=tl.float32) + NO_MAX
    b_sum = tl.zeros([BM], dtype=tl.float32)
    b_acc = tl.zeros([BM, D], dtype=tl.float32)
    if end == b_len:  # the token's own key comes first
        b_key = rotated(p_key, p_key_weight, p_own_cos, p_own_sin, o_d, o_d < D, eps, D, DR, USE_NORM).to(DTYPE)
        b_value = tl.load(p_key + HKV * stride_heads_head + o_d)
        b_max = tl.sum(b_q.to(tl.float32) * b_key.to(tl.float32), 1) * (scale * LOG2_E)
        b_sum += 1.0
        b_acc += b_value.to(tl.float32)
        b_slot = tl.load(p_slots + i_r)
        if b_slot >= 0:
            p_slot = p_head + b_slot // S * stride_block + b_slot % S * stride_slot + o_m * 0 + o_d
            tl.store(p_slot, b_key, mask=o_m == 0)
            tl.store(p_slot + stride_value, b_value, mask=o_m == 0)
    o_pos = tl.zeros([BM], dtype=tl.int32) + (b_len - 1)
    b_p, b_scale, b_sum, b_max = score_tile(
        b_q, b_sum, b_max, b_k, o_n, m_n, o_pos, scale, 1.0, window, None, None, 0, True, USE_WINDOW, False, "tf32"
    )  # fmt: skip
    b_acc = tl.dot(b_p.to(DTYPE), b_v, b_acc * b_scale[:, None])
    for i_n in range(begin + BN, hi, BN):
        b_acc, b_sum, b_max = attend_tile(
            b_q, b_acc, b_sum, b_max, p_head, p_table, i_n, lo, hi, o_pos, scale, 1.0, window, None, None, 0,
            stride_block, stride_value, stride_slot, D, S, BN, D, True, USE_WINDOW, False, "tf32",
        )  # fmt: skip
    o_row = tl.arange(0, BM)
    o_head = i_head * G + o_row
    if num_splits == 1:
        if p_sinks is not None:
            b_sum += weight_of_sink(tl.load(p_sinks + o_head, mask=o_row < G, other=0.0), b_max)
        p_o = p_out + (i_r.to(tl.int64) * (HKV * G) + o_head)[:, None] * D + o_d
        tl.store(p_o, (b_acc / b_sum[:, None]).to(DTYPE), mask=m_q)
    else:
        b_sum = tl.where(b_max > NO_MAX, b_sum, 1.0)
        o_part = (i_r.to(tl.int64) * (HKV * G) + o_head) * MAX_SPLITS + i_split
        tl.store(p_partial + o_part[:, None] * D + o_d, b_acc / b_sum[:, None], mask=m_q)
        tl.store(p_log_sum + o_part, b_max + tl.log2(b_sum), mask=o_row < G)
        p_count = p_arrived + i_r * HKV + i_head
        if done_before(p_count) == num_splits - 1:
            first = (i_r.to(tl.int64) * HKV + i_head) * (G * MAX_SPLITS)
            merge_splits(
                i_r, i_head, first, num_splits, p_partial, p_log_sum, p_sinks, p_out, HKV * G * D, D, MAX_SPLITS, 1,
                G, 1, BG, D, D, BS, MAX_SPLITS, False,
            )  # fmt: skip
            tl.store(p_count, 0)  # for the next layer


def rotated_decode(
    heads: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    norm: HeadNorm | None,
    kv_cache: torch.Tensor,
    meta: AttentionMetadata,
    scratch: RotatedScratch,
    options: AttentionOptions,
) -> torch.Tensor:
    """heads [T, Hq + 2 Hkv, D] of T requests, a token each -> [T, Hq, D]; cos, sin and norm as `FusedOps`'
    rotate_and_write takes them. `scratch`: partial, log_sum, arrived."""
    num_tokens, total_heads, head_dim = heads.shape
    num_kv_heads, block_size = kv_cache.shape[2:4]
    num_heads = total_heads - 2 * num_kv_heads
    group = num_heads // num_kv_heads
    partial, log_sum, arrived = scratch
    assert heads.stride(2) == kv_cache.stride(4) == 1, "head vectors must be contiguous"
    assert cos.stride() == sin.stride(), "cos and sin must lie alike"
    assert cos.stride(2) == 1, "angles must be contiguous"
    out = torch.empty(num_tokens, num_heads, head_dim, dtype=heads.dtype, device=heads.device)
    query_weight, key_weight = (norm.query_weight, norm.key_weight) if norm is not None else (heads, heads)
    most = most_splits(num_kv_heads)
    window, rows, keys = options.sliding_window, next_power_of_2(group), min(64, TILE_BYTES // (2 * head_dim))
    reach = meta.max_seq_len if window is None else min(meta.max_seq_len, window + keys)
    splits = min(most, cdiv(reach, keys))
    rotated_decode_kernel[(num_kv_heads, splits, num_tokens)](
        heads, cos, sin, query_weight, key_weight, kv_cache, options.bias.sinks if options.bias else None,
        meta.slot_mapping, out, partial, log_sum, arrived, meta.block_table, meta.seq_lens,
        norm.eps if norm is not None else 0.0, options.scale, window or 0,
        heads.stride(0), heads.stride(1), cos.stride(0), *kv_cache.stride()[:4], meta.block_table.stride(0),
        HKV=num_kv_heads, G=group, BG=rows, D=head_dim, DR=cos.shape[2], S=block_size, BM=max(16, rows), BN=keys,
        BS=max(1, min(16, _MERGE_ELEMENTS // (rows * head_dim))), MAX_SPLITS=most,
        USE_WINDOW=window is not None, USE_NORM=norm is not None, num_warps=4, num_stages=3,
        **early_launch(heads.device),
    )  # fmt: skip
    return out


def most_splits(num_kv_heads: int) -> int:
    """Most splits of a context: a power of two, of which all run at once."""
    return min(MAX_SPLITS, next_power_of_2(_PROGRAMS // num_kv_heads + 1) // 2 or 1)


def rotated_scratch(meta: AttentionMetadata, num_heads: int, num_kv_heads: int, head_dim: int) -> RotatedScratch:
    """Holds what the programs of a layer pass to each other; made once a step, used by every layer."""
    num_tokens, most, device = meta.seq_lens.shape[0], most_splits(num_kv_heads), meta.seq_lens.device
    partial = torch.empty(num_tokens, num_heads, most, head_dim, dtype=torch.float32, device=device)
    log_sum = torch.empty(num_tokens, num_heads, most, dtype=torch.float32, device=device)
    return partial, log_sum, torch.zeros(num_tokens, num_kv_heads, dtype=torch.int32, device=device)


def serves_rotated(
    heads: torch.Tensor, kv_cache: torch.Tensor, meta: AttentionMetadata, options: AttentionOptions
) -> bool:
    """True of static steps of a lone decode, with an unquantized cache and nothing added to scores. Not in fp32, where
    a request's sum must be cut as it is among many (I6)."""
    bias = options.bias
    return (
        meta.is_static
        and meta.is_apart
        and meta.max_seq_len <= LONGEST
        and 0 < len(heads) == meta.num_decodes <= MOST_TOKENS
        and heads.dtype == kv_cache.dtype
        and heads.dtype in _DTYPES
        and heads.shape[2] in _HEAD_DIMS
        and options.soft_cap is None
        and (bias is None or (bias.slopes is None and bias.by_distance is None))
    )
