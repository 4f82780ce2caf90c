# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""From experts of the model to slots of this rank, and counts of who asked for which: one launch on a GPU."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from app.kernels.launch import cdiv, early_launch
from app.kernels.quick_launch import quick_launch

_BLOCK = 256


@quick_launch
@triton.jit(do_not_specialize=["N"])
def slots_kernel(
    p_ids, p_table, p_positions, p_counts, p_slots, N, stride_table, K: tl.constexpr, COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of N), N = T * K. Counts are whole numbers, whose sum has one value in any order."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m = o < N
    b_ids = tl.load(p_ids + o, mask=m, other=-1)
    m_some = m & (b_ids >= 0)
    b_column = tl.zeros([BLOCK], dtype=tl.int32)
    if p_positions is not None:
        b_column = (tl.load(p_positions + o // K, mask=m, other=0) % COLUMNS).to(tl.int32)
    b_slots = tl.load(p_table + b_ids * stride_table + b_column, mask=m_some, other=-1)
    tl.store(p_slots + o, b_slots, mask=m)
    if p_counts is not None:
        b_one = tl.full([BLOCK], 1, dtype=tl.int64)
        tl.atomic_add(p_counts + b_ids, b_one, mask=m_some, sem="relaxed")


def to_slots(
    ids: torch.Tensor,
    table: torch.Tensor,
    positions: torch.Tensor | None = None,
    counts: torch.Tensor | None = None,
) -> torch.Tensor:
    """The same as `reference.to_slots`."""
    assert ids.is_contiguous()
    assert table.stride(1) == 1
    slots = torch.empty_like(ids)
    if ids.numel() > 0:
        slots_kernel[(cdiv(ids.numel(), _BLOCK),)](
            ids, table, positions, counts, slots, ids.numel(), table.stride(0), K=ids.shape[1],
            COLUMNS=table.shape[1], BLOCK=_BLOCK, num_warps=4, **early_launch(ids.device),
        )  # fmt: skip
    return slots
