# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Products of few rows with packed weights on a GPU, whatever their form (triton_forms.py).

As with plain weights (triton_small.py) reading the weight bounds them, and what follows a product is done with it: the
division of a deferred norm, gate's activation, the sum with the residual and the beginning of its norm. A program takes
a tile of outputs and a share of the inputs; the one of a tile that comes last adds up the shares in a fixed order.
Weights are the left operand: tensor cores take 64 outputs and as few rows as there are. The numbers of a weight, small
whole ones or floats of few bits, are exact in any type; their sums over a group are multiplied by its scale in fp32.
"""

from __future__ import annotations

import triton
import triton.language as tl

from app.kernels.fused.triton_ops import activate
from app.kernels.gemm.triton_forms import exponent_scale, parts_of, unpack_part
from app.kernels.quick_launch import quick_launch


@triton.jit
def group_scales(p_groups, block, num_groups, o_n, m_n, per, G: tl.constexpr, PART: tl.constexpr):
    """[BN]: the scales of part PART of G of a block, each for `per` such parts; p_groups [groups, num_groups], or int32
    [blocks, num_groups] (`exponent_words`)."""
    if p_groups.dtype.element_ty == tl.int32:
        b_words = tl.load(p_groups + block.to(tl.int64) * num_groups + o_n, mask=m_n, other=0)
        b_scale = exponent_scale(b_words, PART)
    else:
        o_group = ((block * G + PART) // per).to(tl.int64) * num_groups
        b_scale = tl.load(p_groups + o_group + o_n, mask=m_n, other=0.0)
    return b_scale


@triton.jit
def one_of(b_0, b_1, b_2, b_3, NUMBER: tl.constexpr):
    """The one of that number."""
    if NUMBER == 0:
        b_one = b_0
    elif NUMBER == 1:
        b_one = b_1
    elif NUMBER == 2:
        b_one = b_2
    else:
        b_one = b_3
    return b_one


@triton.jit
def packed_products(
    p_x, p_words, p_scales, p_offsets, p_table, o_m, o_n, first, count, T, N, K, row, stride_x, num_scales, per,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, FORM: tl.constexpr, G: tl.constexpr, ROWS: tl.constexpr,
    TABLES: tl.constexpr, EVEN: tl.constexpr, EVEN_K: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """fp32 [BN, BM]: rows o_n of the weight times rows o_m of x, over `count` blocks of BK inputs from block `first`.

    G: parts of a block with a scale for each, which holds for `per` such parts; 0: the caller multiplies by scales.
    ROWS of the weight share a scale. TABLES: of the form "table", whether each row has one of its own. WIDE: weights
    are multiplied by their scales instead of sums, which is less to do for many rows of x.
    """
    PARTS: tl.constexpr = parts_of(FORM)
    RUN: tl.constexpr = BK // PARTS
    EACH: tl.constexpr = PARTS if G == 0 else PARTS // G
    DTYPE: tl.constexpr = p_x.dtype.element_ty
    o_j = tl.arange(0, RUN)
    m_m, m_n = o_m[None, :] < T, o_n < N
    p_w = p_words + o_n[:, None].to(tl.int64) * row + first * RUN + o_j[None, :]
    p_row = p_x + o_m[None, :].to(tl.int64) * stride_x + first * BK + o_j[:, None]
    p_entries = p_table
    if TABLES:
        p_entries = p_table + o_n[:, None] * 16
    o_scale = o_n // ROWS
    b_acc = tl.zeros([BN, BM], dtype=tl.float32)
    # Scales come a block ahead: loads that no product waits for are not pipelined.
    b_next0, b_next1, b_next2, b_next3 = 0.0, 0.0, 0.0, 0.0
    if G > 0:
        b_next0 = group_scales(p_scales, first, num_scales, o_scale, m_n, per, G, 0)
    if G > 1:
        b_next1 = group_scales(p_scales, first, num_scales, o_scale, m_n, per, G, 1)
    if G > 2:
        b_next2 = group_scales(p_scales, first, num_scales, o_scale, m_n, per, G, 2)
        b_next3 = group_scales(p_scales, first, num_scales, o_scale, m_n, per, G, 3)
    for i in range(0, count):
        if EVEN:
            b_words = tl.load(p_w)
        else:
            b_words = tl.load(p_w, mask=m_n[:, None], other=0)
        b_scale0, b_scale1, b_scale2, b_scale3 = b_next0, b_next1, b_next2, b_next3
        ahead = first + tl.minimum(i + 1, count - 1)
        if G > 0:
            b_next0 = group_scales(p_scales, ahead, num_scales, o_scale, m_n, per, G, 0)
        if G > 1:
            b_next1 = group_scales(p_scales, ahead, num_scales, o_scale, m_n, per, G, 1)
        if G > 2:
            b_next2 = group_scales(p_scales, ahead, num_scales, o_scale, m_n, per, G, 2)
            b_next3 = group_scales(p_scales, ahead, num_scales, o_scale, m_n, per, G, 3)
        if G == 0 or WIDE:
            b_part = b_acc
        else:
            b_part = tl.zeros([BN, BM], dtype=tl.float32)
        b_sum = tl.zeros([BN, BM], dtype=tl.float32)
        for j in tl.static_range(PARTS):
            if EVEN_K:
                b_x = tl.load(p_row + j * RUN, mask=m_m, other=0.0)
            else:
                m_k = o_j[:, None] < K - (first + i) * BK - j * RUN
                b_x = tl.load(p_row + j * RUN, mask=m_m & m_k, other=0.0)
            b_w = unpack_part(b_words, p_entries, j, FORM, DTYPE)
            if WIDE and G > 0:
                b_scale = one_of(b_scale0, b_scale1, b_scale2, b_scale3, j // EACH)
                b_w *= b_scale.to(DTYPE)[:, None]
                if p_offsets is not None:
                    b_offset = group_scales(p_offsets, first + i, num_scales, o_scale, m_n, per, G, j // EACH)
                    b_w += b_offset.to(DTYPE)[:, None]
            b_part = tl.dot(b_w, b_x, b_part, input_precision=PRECISION)
            if p_offsets is not None and not WIDE:
                b_sum = tl.dot(tl.full([BN, RUN], 1.0, DTYPE), b_x, b_sum, input_precision=PRECISION)
            if G > 0 and not WIDE and (j + 1) % EACH == 0:
                b_scale = one_of(b_scale0, b_scale1, b_scale2, b_scale3, j // EACH)
                b_acc += b_part * b_scale.to(tl.float32)[:, None]
                b_part = tl.zeros([BN, BM], dtype=tl.float32)
                if p_offsets is not None:
                    b_offset = group_scales(p_offsets, first + i, num_scales, o_scale, m_n, per, G, j // EACH)
                    b_acc += b_sum * b_offset.to(tl.float32)[:, None]
                    b_sum = tl.zeros([BN, BM], dtype=tl.float32)
        if G == 0 or WIDE:
            b_acc = b_part
        p_w += RUN
        p_row += BK
    return b_acc


@triton.jit
def summed_shares(p_shares, size, o, m, SPLITS: tl.constexpr):
    """All shares of a tile, in a fixed order."""
    b_sum = tl.load(p_shares + o, mask=m, other=0.0, cache_modifier=".cg")
    for i in tl.static_range(1, SPLITS):
        b_sum += tl.load(p_shares + i * size + o, mask=m, other=0.0, cache_modifier=".cg")
    return b_sum


@quick_launch
@triton.jit(do_not_specialize=["T", "num_blocks"])
def packed_linear_kernel(
    p_x, p_words, p_scales, p_offsets, p_table, p_bias, p_squares, p_residual, p_norm, p_shares, p_arrived, p_out,
    p_rows, p_new_squares, T, N, K, row, stride_x, stride_residual, num_scales, per, num_blocks, eps,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SPLITS: tl.constexpr, FORM: tl.constexpr,
    G: tl.constexpr, ROWS: tl.constexpr, TABLES: tl.constexpr, GATED: tl.constexpr, ACT: tl.constexpr,
    P: tl.constexpr, BP: tl.constexpr, EVEN: tl.constexpr, EVEN_K: tl.constexpr, WIDE: tl.constexpr,
    PRECISION: tl.constexpr, BESIDE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of N, SPLITS, tiles of T). p_out [T, N] = x W^T + bias; GATED: gate's and up's rows with the
    activation, [T, N / 2]; with p_residual their sum; with p_norm [N] p_rows = p_out * p_norm and p_new_squares
    [T, tiles of N]. p_arrived [tiles] is zero before and after. BESIDE: the kernel before writes nothing that is read.
    """
    i_n, i_split, i_m = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    o_m, o_row = i_m * BM + tl.arange(0, BM), tl.arange(0, BN)
    m_m = o_m[None, :] < T
    if GATED:  # a row of gate's, then its row of up's
        o_n = tl.where(i_n * (BN // 2) + o_row // 2 < N // 2, (N // 2) * (o_row % 2) + i_n * (BN // 2) + o_row // 2, N)
    else:
        o_n = i_n * BN + o_row
    m_n = o_n < N
    each = tl.cdiv(num_blocks, SPLITS)
    first = i_split * each
    count = tl.minimum(each, num_blocks - first)
    if EARLY and not BESIDE:
        tl.extra.cuda.gdc_wait()
    b_rms = 1.0
    if p_squares is not None:  # before the loop, so that they are on their way with the weight
        o_p = tl.arange(0, BP)[:, None]
        b_squares = tl.load(p_squares + o_m[None, :] * P + o_p, mask=m_m & (o_p < P), other=0.0)
        b_rms = tl.rsqrt(tl.sum(b_squares, 0)[None, :] / K + eps)
    b_acc = packed_products(
        p_x, p_words, p_scales, p_offsets, p_table, o_m, o_n, first, count, T, N, K, row, stride_x, num_scales, per,
        BM, BN, BK, FORM, G, ROWS, TABLES, EVEN, EVEN_K, WIDE, PRECISION,
    )  # fmt: skip
    if EARLY and BESIDE:
        tl.extra.cuda.gdc_wait()
    if SPLITS > 1:
        o, size = o_m[None, :].to(tl.int64) * N + o_n[:, None], T.to(tl.int64) * N
        tl.store(p_shares + i_split * size + o, b_acc, mask=m_m & m_n[:, None])
        tl.debug_barrier()  # all threads have stored before one of them says so
        p_count = p_arrived + i_m * tl.num_programs(0) + i_n
        arrived = tl.atomic_add(p_count, 1, sem="acq_rel")
        if arrived < SPLITS - 1:
            return
        tl.debug_barrier()
        tl.store(p_count, 0)  # for the next launch
        b_acc = summed_shares(p_shares, size, o, m_m & m_n[:, None], SPLITS)
    if G == 0:
        b_acc *= tl.load(p_scales + o_n, mask=m_n, other=0.0).to(tl.float32)[:, None]
    if p_squares is not None:
        b_acc *= b_rms
    if p_bias is not None:
        b_acc += tl.load(p_bias + o_n, mask=m_n, other=0.0).to(tl.float32)[:, None]
    b_out = b_acc.to(p_out.dtype.element_ty)
    if GATED:
        b_gate, b_up = tl.split(tl.permute(tl.reshape(b_out, [BN // 2, 2, BM]), (0, 2, 1)))
        b_gate = activate(b_gate.to(tl.float32), ACT) * b_up.to(tl.float32)
        o_half = i_n * (BN // 2) + tl.arange(0, BN // 2)[:, None]
        p_half = p_out + o_m[None, :].to(tl.int64) * (N // 2) + o_half
        tl.store(p_half, b_gate.to(p_out.dtype.element_ty), mask=m_m & (o_half < N // 2))
    else:
        _finish(b_out, p_residual, p_norm, p_out, p_rows, p_new_squares, o_m, o_n, m_m, m_n, T, N, stride_residual, i_n)


@triton.jit
def _finish(b_out, p_residual, p_norm, p_out, p_rows, p_new_squares, o_m, o_n, m_m, m_n, T, N, stride_residual, i_n):
    """Add the residual, store, and begin the norm."""
    m, o = m_m & m_n[:, None], o_m[None, :].to(tl.int64) * N + o_n[:, None]
    if p_residual is not None:
        b_residual = tl.load(p_residual + o_m[None, :] * stride_residual + o_n[:, None], mask=m, other=0.0)
        b_out = (b_out.to(tl.float32) + b_residual.to(tl.float32)).to(p_out.dtype.element_ty)
    tl.store(p_out + o, b_out, mask=m)
    if p_norm is not None:
        b_sum = b_out.to(tl.float32)  # the norm is that of what is stored
        b_norm = tl.load(p_norm + o_n, mask=m_n, other=0.0).to(tl.float32)[:, None]
        tl.store(p_rows + o, (b_sum * b_norm).to(p_rows.dtype.element_ty), mask=m)
        b_sum = tl.where(m_n[:, None], b_sum, 0.0)
        tl.store(p_new_squares + o_m * tl.num_programs(0) + i_n, tl.sum(b_sum * b_sum, 0), mask=o_m < T)
