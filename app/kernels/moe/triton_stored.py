# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Experts' weights of few bits as plain ones, for steps of so many rows that unpacking each tile anew takes longer."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from app.kernels.gemm.triton_forms import exponent_scale, parts_of, unpack_part
from app.kernels.launch import cdiv, early_launch
from app.kernels.moe import PackedExperts
from app.kernels.moe.stored import stored_tiles
from app.kernels.quick_launch import quick_launch

_ROWS = 32  # of a program


@quick_launch
@triton.jit
def unpack_experts_kernel(
    p_words, p_scales, p_offsets, p_table, p_out, N, K, row, num_groups, num_scales, group,
    BN: tl.constexpr, BK: tl.constexpr, FORM: tl.constexpr, ROWS: tl.constexpr, TABLES: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of K, tiles of N, experts): p_out [E, N, K]."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
    PARTS: tl.constexpr = parts_of(FORM)
    RUN: tl.constexpr = BK // PARTS
    i_k, i_n, i_e = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    o_n, o_j = i_n * BN + tl.arange(0, BN), tl.arange(0, RUN)
    m_n = o_n < N
    b_words = tl.load(p_words + (i_e * N + o_n)[:, None] * row + i_k * RUN + o_j[None, :], mask=m_n[:, None], other=0)
    p_entries = p_table
    if p_table is not None:
        p_entries = p_table + i_e * 16
        if TABLES:
            p_entries = p_table + (i_e * N + tl.where(m_n, o_n, 0))[:, None] * 16
    for j in tl.static_range(PARTS):
        o_k = i_k * BK + j * RUN
        o_scale = (i_e * num_groups + tl.minimum(o_k // group, num_groups - 1)) * num_scales + o_n // ROWS
        b_out = unpack_part(b_words, p_entries, j, FORM, p_out.dtype.element_ty).to(tl.float32)
        if p_scales.dtype.element_ty == tl.int32:
            o_word = (i_e * num_groups + i_k) * num_scales + o_n
            b_out *= exponent_scale(tl.load(p_scales + o_word, mask=m_n, other=0), j)[:, None]
        else:
            b_out *= tl.load(p_scales + o_scale, mask=m_n, other=0.0).to(tl.float32)[:, None]
        if p_offsets is not None:
            b_out += tl.load(p_offsets + o_scale, mask=m_n, other=0.0).to(tl.float32)[:, None]
        p_o = p_out + (i_e * N + o_n)[:, None] * K + (o_k + o_j)[None, :]
        tl.store(p_o, b_out.to(p_out.dtype.element_ty), mask=m_n[:, None] & (o_k + o_j < K)[None, :])


def plain_experts(weight: torch.Tensor | PackedExperts, dtype: torch.dtype) -> torch.Tensor:
    """[E, N, K] in `dtype`: a plain weight itself, another unpacked."""
    if isinstance(weight, torch.Tensor):
        return weight
    (num_experts, num_rows, size), stored = weight.shape, stored_tiles(weight)
    if stored is None:
        return torch.stack([weight.dequantize(expert).to(dtype) for expert in range(num_experts)])
    out = torch.empty(num_experts, num_rows, size, dtype=dtype, device=stored.words.device)
    unpack_experts_kernel[(cdiv(size, stored.block), cdiv(num_rows, _ROWS), num_experts)](
        stored.words, stored.scales, stored.offsets, stored.table, out, num_rows, size, stored.words.shape[2],
        stored.scales.shape[1], stored.scales.shape[2], min(stored.group, size), BN=_ROWS, BK=stored.block,
        FORM=stored.form, ROWS=stored.scale_rows, TABLES=stored.table is not None and stored.table.dim() == 3,
        num_warps=4, **early_launch(out.device),
    )  # fmt: skip
    return out
