# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""A tile's products with an expert's weight of few bits, which is unpacked in registers.

The weight is the left side of the products, so that a tile may have as few rows of x as there are. Gate's and up's rows
come in turn in one tile: x is read once, and both are at the same place of what comes out.
"""

from __future__ import annotations

import triton
import triton.language as tl

from app.kernels.gemm.triton_forms import RAW_EXPONENTS, exponent_scale, parts_of, raw_exponent, unpack_part
from app.kernels.gemm.triton_packed import group_scales, one_of


@triton.jit
def block_scales(p_scales, block, num_scales, o_scale, m_n, per, G: tl.constexpr):
    """[BN] of what holds the scales of each of up to four parts."""
    b_0, b_1, b_2, b_3 = 0.0, 0.0, 0.0, 0.0
    if p_scales.dtype.element_ty == tl.int32:
        b_0 = tl.load(p_scales + block.to(tl.int64) * num_scales + o_scale, mask=m_n, other=0)
        b_1, b_2, b_3 = b_0, b_0, b_0
    else:
        if G > 0:
            b_0 = group_scales(p_scales, block, num_scales, o_scale, m_n, per, G, 0)
        if G > 1:
            b_1 = group_scales(p_scales, block, num_scales, o_scale, m_n, per, G, 1)
        if G > 2:
            b_2 = group_scales(p_scales, block, num_scales, o_scale, m_n, per, G, 2)
            b_3 = group_scales(p_scales, block, num_scales, o_scale, m_n, per, G, 3)
    return b_0, b_1, b_2, b_3


@triton.jit
def part_scale(b_0, b_1, b_2, b_3, NUMBER: tl.constexpr):
    """fp32 [BN, 1] of the scales of that part."""
    b_scale = one_of(b_0, b_1, b_2, b_3, NUMBER)
    if b_scale.dtype == tl.int32:
        b_scale = exponent_scale(b_scale, NUMBER)
    return b_scale.to(tl.float32)[:, None]


@triton.jit
def block_products(
    b_acc, p_w, p_rows, p_entries, b_scale0, b_scale1, b_scale2, b_scale3, p_offsets, block, num_scales, per, o_scale,
    m_n, m_m, left,
    BN: tl.constexpr, BM: tl.constexpr, RUN: tl.constexpr, FORM: tl.constexpr, G: tl.constexpr, EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr, WIDE: tl.constexpr, RAW: tl.constexpr, DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """b_acc [BN, BM] + a block of the weight times the same inputs of x, of which there are `left`."""
    PARTS: tl.constexpr = parts_of(FORM)
    EACH: tl.constexpr = PARTS if G == 0 else PARTS // G
    UP: tl.constexpr = raw_exponent(RAW_EXPONENTS, FORM, DTYPE, 0)
    o_j = tl.arange(0, RUN)
    if EVEN_N:
        b_words = tl.load(p_w)
    else:
        b_words = tl.load(p_w, mask=m_n[:, None], other=0)
    if G == 0 or WIDE:
        b_part = b_acc
    else:
        b_part = tl.zeros([BN, BM], dtype=tl.float32)
    b_sum = tl.zeros([BN, BM], dtype=tl.float32)
    for j in tl.static_range(PARTS):
        if EVEN_K:
            b_x = tl.load(p_rows + j * RUN, mask=m_m[None, :], other=0.0)
        else:
            b_x = tl.load(p_rows + j * RUN, mask=m_m[None, :] & (o_j < left - j * RUN)[:, None], other=0.0)
        if RAW and UP > 0:
            b_x *= tl.full((), 2.0**UP, DTYPE)
        b_w = unpack_part(b_words, p_entries, j, FORM, DTYPE, RAW)
        if WIDE and G > 0:
            b_w *= part_scale(b_scale0, b_scale1, b_scale2, b_scale3, j // EACH).to(DTYPE)
            if p_offsets is not None:
                b_offset = group_scales(p_offsets, block, num_scales, o_scale, m_n, per, G, j // EACH)
                b_w += b_offset.to(DTYPE)[:, None]
        b_part = tl.dot(b_w, b_x, b_part, input_precision=PRECISION)
        if p_offsets is not None and not WIDE:
            b_sum = tl.dot(tl.full([BN, RUN], 1.0, DTYPE), b_x, b_sum, input_precision=PRECISION)
        if G > 0 and not WIDE and (j + 1) % EACH == 0:
            b_acc += b_part * part_scale(b_scale0, b_scale1, b_scale2, b_scale3, j // EACH)
            b_part = tl.zeros([BN, BM], dtype=tl.float32)
            if p_offsets is not None:
                b_offset = group_scales(p_offsets, block, num_scales, o_scale, m_n, per, G, j // EACH)
                b_acc += b_sum * b_offset.to(tl.float32)[:, None]
                b_sum = tl.zeros([BN, BM], dtype=tl.float32)
    if G == 0 or WIDE:
        b_acc = b_part
    return b_acc


@triton.jit
def stored_products(
    p_x, p_words, p_scales, p_offsets, p_table, i_e, b_row, m_m, o_n, m_n, first, last, num_rows, K, stride_x, row,
    num_groups, num_scales, per,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, FORM: tl.constexpr, G: tl.constexpr, ROWS: tl.constexpr,
    TABLES: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """fp32 [BN, BM]: rows o_n of expert i_e's weight [num_rows, K] (`StoredTiles`) times rows b_row of x, over blocks
    `first` to `last`.

    G: parts of a block with a scale for each, which holds for `per` such parts; 0: one for a row. WIDE: weights are
    multiplied by their scales instead of sums, which is less to do for many rows of x.
    """
    RUN: tl.constexpr = BK // parts_of(FORM)
    DTYPE: tl.constexpr = p_x.dtype.element_ty
    # Where a tile of x is in registers that have been loaded once, multiplying it is less than multiplying the weight.
    RAW: tl.constexpr = (BM < 16) & ((FORM == "e2m1") | (FORM == "e4m3"))
    o_j = tl.arange(0, RUN)
    p_w = p_words + (i_e.to(tl.int64) * num_rows + o_n)[:, None] * row + first * RUN + o_j[None, :]
    p_rows = p_x + b_row.to(tl.int64)[None, :] * stride_x + first * BK + o_j[:, None]
    o_scale = o_n // ROWS
    p_scales += i_e.to(tl.int64) * num_groups * num_scales
    if p_offsets is not None:
        p_offsets += i_e.to(tl.int64) * num_groups * num_scales
    p_entries = p_table
    if p_table is not None:
        p_entries = p_table + i_e * 16
        if TABLES:
            p_entries = p_table + (i_e * num_rows + tl.where(m_n, o_n, 0))[:, None] * 16
    b_acc = tl.zeros([BN, BM], dtype=tl.float32)
    # Scales come a block ahead: loads that no product waits for are not pipelined.
    b_next0, b_next1, b_next2, b_next3 = block_scales(p_scales, first, num_scales, o_scale, m_n, per, G)
    whole = tl.minimum(last, K // BK)
    for i in range(first, whole):
        b_scale0, b_scale1, b_scale2, b_scale3 = b_next0, b_next1, b_next2, b_next3
        ahead = tl.minimum(i + 1, last - 1)
        b_next0, b_next1, b_next2, b_next3 = block_scales(p_scales, ahead, num_scales, o_scale, m_n, per, G)
        b_acc = block_products(
            b_acc, p_w, p_rows, p_entries, b_scale0, b_scale1, b_scale2, b_scale3, p_offsets, i, num_scales, per,
            o_scale, m_n, m_m, BK, BN, BM, RUN, FORM, G, EVEN_N, True, WIDE, RAW, DTYPE, PRECISION,
        )  # fmt: skip
        p_w += RUN
        p_rows += BK
    if not EVEN_K and whole < last:
        b_acc = block_products(
            b_acc, p_w, p_rows, p_entries, b_next0, b_next1, b_next2, b_next3, p_offsets, whole, num_scales, per,
            o_scale, m_n, m_m, K - whole * BK, BN, BM, RUN, FORM, G, EVEN_N, False, WIDE, RAW, DTYPE, PRECISION,
        )  # fmt: skip
    if RAW:
        UP: tl.constexpr = raw_exponent(RAW_EXPONENTS, FORM, DTYPE, 1)
        b_acc *= 2.0**UP
    if G == 0:
        b_acc *= tl.load(p_scales + o_n, mask=m_n, other=0.0).to(tl.float32)[:, None]
    return b_acc
