# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Packed weights as numbers on a GPU, some rows at a time, for products of many rows by cuBLAS."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from app.kernels.gemm.stored import StoredTiles
from app.kernels.gemm.triton_forms import exponent_scale, parts_of, unpack_part
from app.kernels.launch import cdiv
from app.kernels.quick_launch import quick_launch

_ROWS = 64


@quick_launch
@triton.jit
def dequantize_kernel(
    p_words, p_scales, p_offsets, p_table, p_out, start, N, K, row, num_scales, group,
    BN: tl.constexpr, BK: tl.constexpr, FORM: tl.constexpr, ROWS: tl.constexpr, TABLES: tl.constexpr,
    ONE_GROUP: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of rows, blocks): p_out [N - start, K] = rows start..N of the weight. ONE_GROUP: a part of a block
    lies in one, so that a row has one scale there."""
    RUN: tl.constexpr = BK // parts_of(FORM)
    i_k = tl.program_id(1)
    o_n, o_j = start + tl.program_id(0) * BN + tl.arange(0, BN), tl.arange(0, RUN)
    m_n = o_n < N
    b_words = tl.load(p_words + o_n[:, None].to(tl.int64) * row + i_k * RUN + o_j[None, :], mask=m_n[:, None], other=0)
    p_entries = p_table
    if TABLES:
        p_entries = p_table + o_n[:, None] * 16
    for j in tl.static_range(parts_of(FORM)):
        o_k = i_k * BK + j * RUN + o_j[None, :]
        m = m_n[:, None] & (o_k < K)
        o_of = tl.minimum(i_k * BK + j * RUN, K - 1) if ONE_GROUP else o_k
        o_scale = (o_of // group).to(tl.int64) * num_scales + o_n[:, None] // ROWS
        m_scale = m_n[:, None] if ONE_GROUP else m
        b_w = unpack_part(b_words, p_entries, j, FORM, p_out.dtype.element_ty).to(tl.float32)
        if p_scales.dtype.element_ty == tl.int32:
            b_exponents = tl.load(p_scales + i_k.to(tl.int64) * num_scales + o_n[:, None], mask=m_n[:, None], other=0)
            b_w *= exponent_scale(b_exponents, j)
        else:
            b_w *= tl.load(p_scales + o_scale, mask=m_scale, other=0.0).to(tl.float32)
        if p_offsets is not None:
            b_w += tl.load(p_offsets + o_scale, mask=m_scale, other=0.0).to(tl.float32)
        p_o = p_out + (o_n[:, None] - start).to(tl.int64) * K + o_k
        tl.store(p_o, b_w.to(p_out.dtype.element_ty), mask=m)


def dequantized(stored: StoredTiles, start: int, stop: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows start..stop, [stop - start, K]."""
    out = torch.empty(stop - start, stored.size, dtype=dtype, device=stored.words.device)
    row = stored.words.shape[1]
    dequantize_kernel[(cdiv(stop - start, _ROWS), cdiv(row, stored.run))](
        stored.words, stored.scales, stored.offsets, stored.table, out, start, stop, stored.size, row,
        stored.scales.shape[1], min(stored.group, 1 << 30), BN=_ROWS, BK=stored.block, FORM=stored.form,
        ROWS=stored.scale_rows, TABLES=stored.table is not None and stored.table.dim() == 2,
        ONE_GROUP=stored.group % stored.run == 0 or stored.group >= stored.size,
    )  # fmt: skip
    return out
