# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""One tile of a grouped product on a GPU: some rows of x times some columns of one expert's weight.

Gate and up come with their activation; the norm that a `DeferredNorm` left out, biases and weights of rows ride along.
With few rows the weight is the side of a product that a Hopper's tensor cores take 64 rows of (SWAP), and tokens the
narrow side; weights of few bits, which are unpacked in registers, are always that side.
"""

from __future__ import annotations

import triton
import triton.language as tl

from app.kernels.fused.triton_ops import activate
from app.kernels.gemm.triton_packed import packed_products


@triton.jit
def gated(b_gate, b_up, limit, alpha, up_offset, ACT: tl.constexpr, HAS_LIMIT: tl.constexpr):
    """The gated activation of fp32 numbers (`GLU`)."""
    if HAS_LIMIT:
        b_gate = tl.minimum(b_gate, limit)
        b_up = tl.minimum(tl.maximum(b_up, -limit), limit)
    if ACT == "silu":
        b_gate = b_gate * tl.sigmoid(alpha * b_gate)
    else:
        b_gate = activate(b_gate, ACT)
    return b_gate * (b_up + up_offset)


@triton.jit
def load_weight(weight, row, o_n, i_k, o_k, N, K, BN: tl.constexpr, BK: tl.constexpr, TMA: tl.constexpr,
                EVEN_N: tl.constexpr, EVEN_K: tl.constexpr):  # fmt: skip
    """[BN, BK] of a weight [.., K], rows from `row`, of which o_n counts those within its expert's N."""
    if TMA:
        b_w = weight.load([row, i_k])
    else:
        p_w = weight + (row.to(tl.int64) + tl.arange(0, BN)[:, None]) * K + (i_k + o_k)[None, :]
        if EVEN_N and EVEN_K:
            b_w = tl.load(p_w)
        else:
            b_w = tl.load(p_w, mask=(o_n[:, None] < N) & ((i_k + o_k)[None, :] < K), other=0.0)
    return b_w


@triton.jit
def plain_products(
    p_x, weight, b_row, m_m, first, o_n, N, K, stride_x,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GATED: tl.constexpr, SWAP: tl.constexpr, TMA: tl.constexpr,
    EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """fp32 [BM, BN]: rows b_row of x times rows of a weight from `first`; gated: and N further down."""
    o_k = tl.arange(0, BK)
    p_rows = p_x + b_row[:, None].to(tl.int64) * stride_x + o_k[None, :]
    if SWAP:
        b_acc = tl.zeros([BN, BM], dtype=tl.float32)
        b_up = tl.zeros([BN, BM], dtype=tl.float32)
    else:
        b_acc = tl.zeros([BM, BN], dtype=tl.float32)
        b_up = tl.zeros([BM, BN], dtype=tl.float32)
    for i_k in range(0, K, BK):
        if EVEN_K:
            b_x = tl.load(p_rows + i_k, mask=m_m[:, None], other=0.0)
        else:
            b_x = tl.load(p_rows + i_k, mask=m_m[:, None] & (i_k + o_k < K)[None, :], other=0.0)
        b_w = load_weight(weight, first, o_n, i_k, o_k, N, K, BN, BK, TMA, EVEN_N, EVEN_K)
        if SWAP:
            b_acc = tl.dot(b_w, tl.trans(b_x), b_acc, input_precision=PRECISION)
        else:
            b_acc = tl.dot(b_x, tl.trans(b_w), b_acc, input_precision=PRECISION)
        if GATED:
            b_w = load_weight(weight, first + N, o_n, i_k, o_k, N, K, BN, BK, TMA, EVEN_N, EVEN_K)
            if SWAP:
                b_up = tl.dot(b_w, tl.trans(b_x), b_up, input_precision=PRECISION)
            else:
                b_up = tl.dot(b_x, tl.trans(b_w), b_up, input_precision=PRECISION)
    if SWAP:
        b_acc = tl.trans(b_acc)
        b_up = tl.trans(b_up)
    return b_acc, b_up


@triton.jit
def stored_products(
    p_x, p_words, p_scales, p_offsets, p_table, i_e, b_row, m_m, i_n, N, K, stride_x, row, num_groups, num_scales, per,
    num_blocks,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GATED: tl.constexpr, FORM: tl.constexpr,
    G: tl.constexpr, ROWS: tl.constexpr, TABLES: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """The same with expert i_e's weight of few bits (`StoredTiles`)."""
    ALL: tl.constexpr = 2 if GATED else 1
    o_n = i_n * BN + tl.arange(0, BN)
    o_m = tl.where(m_m, b_row, 0x7FFFFFFF)  # not a row of x
    p_words += i_e.to(tl.int64) * ALL * N * row
    o_scales = i_e.to(tl.int64) * num_groups * num_scales
    p_scales += o_scales
    if p_offsets is not None:
        p_offsets += o_scales
    if p_table is not None:
        p_table += i_e * (ALL * N if TABLES else 1) * 16
    begin = tl.full((), 0, tl.int32)  # not a constant, of which the callee could make no 64 bits
    b_acc = packed_products(
        p_x, p_words, p_scales, p_offsets, p_table, o_m, o_n, begin, num_blocks, 0x7FFFFFFF, ALL * N, K, row, stride_x,
        num_scales, per, BM, BN, BK, FORM, G, ROWS, TABLES, EVEN_N, EVEN_K, BM > 32,
        PRECISION,
    )  # fmt: skip
    b_up = b_acc
    if GATED:
        b_up = packed_products(
            p_x, p_words, p_scales, p_offsets, p_table, o_m, N + o_n, begin, num_blocks, 0x7FFFFFFF, ALL * N, K, row,
            stride_x, num_scales, per, BM, BN, BK, FORM, G, ROWS, TABLES, EVEN_N, EVEN_K, BM > 32,
        PRECISION,
        )  # fmt: skip
    if G == 0:
        b_acc *= tl.load(p_scales + o_n, mask=o_n < N, other=0.0).to(tl.float32)[:, None]
        if GATED:
            b_up *= tl.load(p_scales + N + o_n, mask=o_n < N, other=0.0).to(tl.float32)[:, None]
    return tl.trans(b_acc), tl.trans(b_up)


@triton.jit
def expert_tile(
    p_x, weight, p_scales, p_offsets, p_table, p_bias, p_squares, p_weights, p_out, i_e, i_n, b_row, b_pair, b_out, m_m,
    N, K, stride_x, row, num_groups, num_scales, per, num_blocks, eps, limit, alpha, up_offset,
    P: tl.constexpr, BP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GATED: tl.constexpr,
    ACT: tl.constexpr, HAS_LIMIT: tl.constexpr, SWAP: tl.constexpr, TMA: tl.constexpr, EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr, PRECISION: tl.constexpr, FORM: tl.constexpr, G: tl.constexpr, ROWS: tl.constexpr,
    TABLES: tl.constexpr,
):  # fmt: skip
    """Rows b_row [BM] of x times columns i_n of expert i_e's weight into rows b_out; m_m: which there are."""
    o_n = i_n * BN + tl.arange(0, BN)
    m_n = o_n < N
    if FORM == "plain":
        b_acc, b_up = plain_products(
            p_x, weight, b_row, m_m, i_e * (2 * N if GATED else N) + i_n * BN, o_n, N, K, stride_x, BM, BN, BK, GATED,
            SWAP, TMA, EVEN_N, EVEN_K, PRECISION,
        )  # fmt: skip
    else:
        b_acc, b_up = stored_products(
            p_x, weight, p_scales, p_offsets, p_table, i_e, b_row, m_m, i_n, N, K, stride_x, row, num_groups,
            num_scales, per, num_blocks, BM, BN, BK, GATED, FORM, G, ROWS, TABLES, EVEN_N, EVEN_K, PRECISION,
        )  # fmt: skip
    if p_squares is not None:
        o_p = tl.arange(0, BP)[None, :]
        b_squares = tl.load(p_squares + b_row[:, None] * P + o_p, mask=m_m[:, None] & (o_p < P), other=0.0)
        b_scale = tl.rsqrt(tl.sum(b_squares, 1) / K + eps)[:, None]
        b_acc *= b_scale
        b_up *= b_scale
    if p_weights is not None:
        b_scale = tl.load(p_weights + b_pair, mask=m_m, other=0.0)[:, None]
        b_acc *= b_scale
        b_up *= b_scale
    if p_bias is not None:
        p_b = p_bias + i_e * (2 * N if GATED else N) + o_n
        b_acc += tl.load(p_b, mask=m_n, other=0.0).to(tl.float32)[None, :]
        if GATED:
            b_up += tl.load(p_b + N, mask=m_n, other=0.0).to(tl.float32)[None, :]
    if GATED:
        b_acc = gated(b_acc, b_up, limit, alpha, up_offset, ACT, HAS_LIMIT)
    p_o = p_out + b_out[:, None].to(tl.int64) * N + o_n[None, :]
    tl.store(p_o, b_acc.to(p_out.dtype.element_ty), mask=m_m[:, None] & m_n[None, :])
