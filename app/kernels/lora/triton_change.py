# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Factors and shifts of adapters on a GPU (the magnitudes of DoRA: Liu et al., 2024; trained biases): one launch over a
product that stands, in place. Rows without a slot are not touched."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from app.kernels.launch import cdiv, early_launch
from app.kernels.lora import SlotChanges, SlotRows
from app.kernels.lora.triton_sort import SortedTokens
from app.kernels.quick_launch import quick_launch

_COLUMNS = 1024  # outputs of one program


@quick_launch
@triton.jit
def change_kernel(
    p_y, p_factors, p_shifts, p_slots, N, stride_y, stride_factors, stride_shifts, BN: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Grid (T, pieces of the outputs): p_y = p_y * factor + shift of the token's slot."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
    i_t = tl.program_id(0).to(tl.int64)
    b_slot = tl.load(p_slots + i_t).to(tl.int64)
    if b_slot < 0:
        return
    o_n = tl.program_id(1) * BN + tl.arange(0, BN)
    m_n = o_n < N
    b_y = tl.load(p_y + i_t * stride_y + o_n, mask=m_n, other=0.0).to(tl.float32)
    b_y *= tl.load(p_factors + b_slot * stride_factors + o_n, mask=m_n, other=0.0)
    b_y += tl.load(p_shifts + b_slot * stride_shifts + o_n, mask=m_n, other=0.0)
    tl.store(p_y + i_t * stride_y + o_n, b_y.to(p_y.dtype.element_ty), mask=m_n)


def change(y: torch.Tensor, changes: SlotChanges, rows: SlotRows) -> torch.Tensor:
    """See Change."""
    assert isinstance(rows, SortedTokens)
    assert y.stride(1) == changes.factors.stride(1) == changes.shifts.stride(1) == 1, "rows must be contiguous"
    size = changes.factors.shape[1]
    change_kernel[(len(y), cdiv(size, _COLUMNS))](
        y, changes.factors, changes.shifts, rows.slots, size, y.stride(0), changes.factors.stride(0),
        changes.shifts.stride(0), BN=_COLUMNS, num_warps=4, **early_launch(y.device),
    )  # fmt: skip
    return y
