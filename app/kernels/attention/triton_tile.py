# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""One step of paged attention in Triton: a tile of queries meets a tile of keys. Decode and prefill share it.

Rows of the query tile are (token, query head) pairs of one KV head. Softmax runs online (Milakov and Gimelshein, 2018;
FlashAttention: Dao et al., 2022) in base 2: `b_max` and `b_sum` are per row, `b_acc` holds the weighted values, not yet
divided by `b_sum`. A slot that no query of the tile sees is never loaded: it may hold NaN. Of a quantized cache the
tiles are converted here; its scales are the caller's: the key's a factor of `scale`, the value's of the result.
"""

from __future__ import annotations

import triton
import triton.language as tl

from app.kernels.launch import next_power_of_2

# The maximum of a row that has seen nothing. Finite, so that hidden scores (-inf) give exp2(-inf) = 0 and not NaN.
NO_MAX = tl.constexpr(-1.0e30)
LOG2_E = tl.constexpr(1.4426950408889634)


def head_columns(head_dim: int) -> int:
    """Columns of a tile of heads: a power of two, and no fewer than a product takes on a GPU."""
    return max(16, next_power_of_2(head_dim))


@triton.jit
def cap_scores(b_s, soft_cap):
    """Bound scores to (-soft_cap, soft_cap) by a tanh written with exp2, which does not overflow."""
    return soft_cap * (1.0 - 2.0 / (tl.exp2(b_s * (2.0 * LOG2_E / soft_cap)) + 1.0))


@triton.jit
def weight_of_sink(b_sink, b_max):
    """Returns what a sink [BM] adds to sums of exp2(score - b_max), in base 2."""
    return tl.exp2(b_sink * LOG2_E - b_max)


@triton.jit
def tile_offsets(p_table, i_n, o_n, m_n, stride_block, stride_slot, S: tl.constexpr, BN: tl.constexpr):
    """Offsets int64 [BN] of positions `o_n` = i_n + [0, BN) from the start of a KV head in block 0."""
    if S % BN == 0:  # the tile lies within one block: one entry of the table
        b_block = tl.load(p_table + i_n // S).to(tl.int64)
        return b_block * stride_block + (o_n % S).to(tl.int64) * stride_slot
    else:
        b_blocks = tl.load(p_table + o_n // S, mask=m_n, other=0).to(tl.int64)
        return b_blocks * stride_block + (o_n % S).to(tl.int64) * stride_slot


@triton.jit
def score_tile(
    b_q, b_sum, b_max, b_k, o_n, m_n, o_pos, scale, soft_cap, window, b_slope, p_bias, num_bias,
    MASKED: tl.constexpr, USE_WINDOW: tl.constexpr, USE_CAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """(weights [BM, BN], factor [BM] of what was accumulated before, b_sum, b_max) after attending the keys b_k [BN,
    BD] of positions o_n; see `attend_tile`."""
    b_k = b_k.to(b_q.dtype)  # exact, from a quantized cache; else nothing
    b_s = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)
    # The factor to base-2 scores is applied after the maximum, where it fuses with the subtraction.
    factor = scale * LOG2_E
    if USE_CAP:
        b_s = cap_scores(b_s * scale, soft_cap)
        factor = LOG2_E
    if b_slope is not None:
        if not USE_CAP:
            b_s = b_s * scale
        b_s += b_slope[:, None] * (o_n[None, :] - o_pos[:, None]).to(tl.float32)
        factor = LOG2_E
    if p_bias is not None:
        if not USE_CAP and b_slope is None:
            b_s = b_s * scale
        o_bias = tl.maximum(tl.minimum(o_pos[:, None] - o_n[None, :], num_bias - 1), 0)
        b_s += tl.load(p_bias[:, None] + o_bias)
        factor = LOG2_E
    if MASKED:
        m_s = (o_n[None, :] <= o_pos[:, None]) & m_n[None, :]
        if USE_WINDOW:
            m_s = m_s & (o_n[None, :] > o_pos[:, None] - window)
        b_s = tl.where(m_s, b_s, float("-inf"))
    b_new_max = tl.maximum(b_max, tl.max(b_s, 1) * factor)
    b_scale = tl.exp2(b_max - b_new_max)
    b_p = tl.exp2(b_s * factor - b_new_max[:, None])
    return b_p, b_scale, b_sum * b_scale + tl.sum(b_p, 1), b_new_max


@triton.jit
def attend_tile(
    b_q,  # [BM, BD]
    b_acc,  # fp32 [BM, BD]
    b_sum,  # fp32 [BM]
    b_max,  # fp32 [BM]
    p_head,  # keys of the KV head in block 0; values lie stride_value further
    p_table,  # the request's row of the block table
    i_n,  # first position of the tile, a multiple of BN
    lo,  # positions in [lo, hi) are seen by some row
    hi,
    o_pos,  # int32 [BM], position of each row's token
    scale,  # above 0
    soft_cap,
    window,
    b_slope,  # fp32 [BM], ALiBi's; None: none. Needs o_pos to be positions
    p_bias,  # [BM] pointers to a row's fp32 [num_bias] by distance; None: none. Needs o_pos, too
    num_bias,
    stride_block,
    stride_value,
    stride_slot,
    D: tl.constexpr,
    S: tl.constexpr,
    BN: tl.constexpr,
    BD: tl.constexpr,
    MASKED: tl.constexpr,  # False: every row sees the whole tile
    USE_WINDOW: tl.constexpr,
    USE_CAP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Fold the keys and values of positions [i_n, i_n + BN) into (b_acc, b_sum, b_max) and return them."""
    o_n = i_n + tl.arange(0, BN)
    o_d = tl.arange(0, BD)
    m_n = (o_n >= lo) & (o_n < hi)
    o_kv = tile_offsets(p_table, i_n, o_n, m_n, stride_block, stride_slot, S, BN)
    p_k = p_head + o_kv[:, None] + o_d[None, :]  # [BN, BD], and the values beside them: one set of addresses
    p_v = p_k + stride_value
    if MASKED:
        b_k = tl.load(p_k, mask=m_n[:, None] & (o_d[None, :] < D), other=0.0)
    elif D == BD:
        b_k = tl.load(p_k)
    else:
        b_k = tl.load(p_k, mask=o_d[None, :] < D, other=0.0)
    b_p, b_scale, b_sum, b_max = score_tile(
        b_q,
        b_sum,
        b_max,
        b_k,
        o_n,
        m_n,
        o_pos,
        scale,
        soft_cap,
        window,
        b_slope,
        p_bias,
        num_bias,
        MASKED,
        USE_WINDOW,
        USE_CAP,
        PRECISION,
    )
    if MASKED:
        b_v = tl.load(p_v, mask=m_n[:, None] & (o_d[None, :] < D), other=0.0)
    elif D == BD:
        b_v = tl.load(p_v)
    else:
        b_v = tl.load(p_v, mask=o_d[None, :] < D, other=0.0)
    b_v = b_v.to(b_q.dtype)
    b_acc = tl.dot(b_p.to(b_v.dtype), b_v, b_acc * b_scale[:, None], input_precision=PRECISION)
    return b_acc, b_sum, b_max
