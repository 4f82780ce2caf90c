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
from app.kernels.gemm.triton_packed import summed_shares
from app.kernels.moe.triton_stored_tile import stored_products


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
def tile_rows(i_n, N, BN: tl.constexpr, GATED: tl.constexpr):
    """Returns which rows of a stored weight a tile reads, and which of them there are; GATED: of gate's and up's
    in turn."""
    if GATED:
        o_row = tl.arange(0, 2 * BN)
        o_n = i_n * BN + o_row // 2
        m_n = o_n < N
        o_n += (o_row % 2) * N
    else:
        o_n = i_n * BN + tl.arange(0, BN)
        m_n = o_n < N
    return o_n, m_n


@triton.jit
def gate_and_up(b_acc, BN: tl.constexpr, BM: tl.constexpr, GATED: tl.constexpr):
    """[BM, BN] of both."""
    b_up = b_acc
    if GATED:
        b_acc, b_up = tl.split(tl.permute(tl.reshape(b_acc, [BN, 2, BM]), (0, 2, 1)))
    return tl.trans(b_acc), tl.trans(b_up)


@triton.jit
def shared_sum(b_acc, p_shares, p_arrived, b_pair, o_n, m, i_split, num_pairs, num_rows, SPLITS: tl.constexpr):
    """(the sum of what all of a tile's SPLITS programs have, in a fixed order; whether this is the last of them)."""
    o, size = b_pair[None, :].to(tl.int64) * num_rows + o_n[:, None], num_pairs.to(tl.int64) * num_rows
    tl.store(p_shares + i_split * size + o, b_acc, mask=m)
    tl.debug_barrier()  # all threads have stored before one of them says so
    is_last = tl.atomic_add(p_arrived, 1, sem="acq_rel") == SPLITS - 1
    if is_last:
        tl.debug_barrier()
        tl.store(p_arrived, 0)  # for the next launch
        b_acc = summed_shares(p_shares, size, o, m, SPLITS)
    return b_acc, is_last


@triton.jit
def expert_tile(
    p_x, weight, p_scales, p_offsets, p_table, p_bias, p_squares, p_weights, p_out, p_shares, p_arrived, i_e, i_n,
    i_split, b_row, b_pair, b_out, m_m, num_pairs,
    N, K, stride_x, row, num_groups, num_scales, per, num_blocks, eps, limit, alpha, up_offset,
    P: tl.constexpr, BP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GATED: tl.constexpr,
    ACT: tl.constexpr, HAS_LIMIT: tl.constexpr, SWAP: tl.constexpr, TMA: tl.constexpr, EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr, PRECISION: tl.constexpr, FORM: tl.constexpr, G: tl.constexpr, ROWS: tl.constexpr,
    TABLES: tl.constexpr, WIDE: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Rows b_row [BM] of x times columns i_n of expert i_e's weight into rows b_out; m_m: which there are."""
    ALL: tl.constexpr = 2 if GATED else 1
    o_n = i_n * BN + tl.arange(0, BN)
    m_n = o_n < N
    if FORM == "plain":
        b_acc, b_up = plain_products(
            p_x, weight, b_row, m_m, i_e * ALL * N + i_n * BN, o_n, N, K, stride_x, BM, BN, BK, GATED, SWAP, TMA,
            EVEN_N, EVEN_K, PRECISION,
        )  # fmt: skip
    else:
        o_w, m_w = tile_rows(i_n, N, BN, GATED)
        each = tl.cdiv(num_blocks, SPLITS)
        b_acc = stored_products(
            p_x, weight, p_scales, p_offsets, p_table, i_e, b_row, m_m, o_w, m_w, i_split * each,
            tl.minimum(i_split * each + each, num_blocks), ALL * N, K, stride_x, row, num_groups, num_scales, per, BM,
            ALL * BN, BK, FORM, G, ROWS, TABLES, EVEN_N, EVEN_K, WIDE, PRECISION,
        )  # fmt: skip
        if SPLITS > 1:
            b_acc, is_last = shared_sum(
                b_acc, p_shares, p_arrived, b_pair, o_w, m_m[None, :] & m_w[:, None], i_split, num_pairs, ALL * N,
                SPLITS,
            )  # fmt: skip
            m_m &= is_last
        b_acc, b_up = gate_and_up(b_acc, BN, BM, GATED)
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
        p_b = p_bias + i_e * ALL * N + o_n
        b_acc += tl.load(p_b, mask=m_n, other=0.0).to(tl.float32)[None, :]
        if GATED:
            b_up += tl.load(p_b + N, mask=m_n, other=0.0).to(tl.float32)[None, :]
    if GATED:
        b_acc = gated(b_acc, b_up, limit, alpha, up_offset, ACT, HAS_LIMIT)
    elif ACT == "relu2":
        b_acc = tl.maximum(b_acc, 0.0)
        b_acc *= b_acc
    elif ACT == "plain_gelu":
        b_acc = 0.5 * b_acc * (1.0 + tl.erf(b_acc * 0.7071067811865476))
    p_o = p_out + b_out[:, None].to(tl.int64) * N + o_n[None, :]
    tl.store(p_o, b_acc.to(p_out.dtype.element_ty), mask=m_m[:, None] & m_n[None, :])
