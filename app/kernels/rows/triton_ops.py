# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Finds where a step's tokens lie, in one launch of one program a row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from app.kernels.quick_launch import quick_launch
from app.kernels.rows import RowColumns, StepTensors

_TILE_TOKENS = 256


# Views may start anywhere; `stride_more` differs from step to step.
@quick_launch
@triton.jit(do_not_specialize=["stride_more"], do_not_specialize_on_alignment=["p_rows", "p_starts", "p_counts"])
def begin_step_kernel(
    p_rows,
    p_starts,
    p_counts,
    p_num_computed,
    p_num_tokens,
    p_token_ids,
    p_block_table,
    p_input_ids,
    p_positions,
    p_slots,
    p_lengths,
    p_targets,
    p_out_rows,
    p_seq_lens,
    p_more_slots,
    spare,
    stride_more,
    ROWS: tl.constexpr,
    G: tl.constexpr,
    WIDTH: tl.constexpr,
    MAX_BLOCKS: tl.constexpr,
    S: tl.constexpr,
    BT: tl.constexpr,
):
    """Grid (R,), one warp each: all of its threads have read a count before one of them writes it."""
    i_r = tl.program_id(0)
    b_row = tl.load(p_rows + i_r).to(tl.int64)
    is_live = b_row >= 0
    b_row = tl.maximum(b_row, 0)
    b_start = tl.load(p_starts + i_r)
    b_count = tl.load(p_starts + i_r + 1) - b_start
    b_held = b_count
    if p_counts is not None:
        b_held = tl.load(p_counts + i_r)
    b_computed = tl.where(is_live, tl.load(p_num_computed + b_row), 0)
    b_known = tl.load(p_num_tokens + b_row)
    for i_tile in range(0, b_count, BT):
        o_token = i_tile + tl.arange(0, BT)
        m_token = o_token < b_count
        is_held = is_live & (o_token < b_held)
        b_position = tl.where(is_held, b_computed + o_token, 0).to(tl.int64)
        b_block = tl.load(p_block_table + b_row * MAX_BLOCKS + b_position // S, mask=m_token, other=0).to(tl.int64)
        b_source = tl.where(is_held, b_row * WIDTH + b_position, spare)
        o_out = b_start + o_token
        tl.store(p_input_ids + o_out, tl.load(p_token_ids + b_source, mask=m_token, other=0), mask=m_token)
        tl.store(p_positions + o_out, b_position, mask=m_token)
        tl.store(p_slots + o_out, tl.where(is_held, b_block * S + b_position % S, -1), mask=m_token)
        for i_g in tl.static_range(1, G):
            p_entry = p_block_table + (i_g * ROWS + b_row) * MAX_BLOCKS + b_position // S
            b_slot = tl.load(p_entry, mask=m_token, other=0).to(tl.int64) * S + b_position % S
            o_slot = (i_g - 1) * stride_more + o_out
            tl.store(p_more_slots + o_slot, tl.where(is_held, b_slot, -1), mask=m_token)
        tl.store(p_lengths + o_out, b_position + 1, mask=m_token)
        tl.store(p_targets + o_out, b_source + 1, mask=m_token)
    b_after = b_computed + b_held
    tl.store(p_out_rows + i_r, b_row.to(tl.int32))
    tl.store(p_seq_lens + i_r, b_computed + b_count)
    tl.store(p_num_computed + b_row, b_after, mask=is_live)
    tl.store(p_num_tokens + b_row, tl.maximum(b_known, b_after + 1), mask=is_live)


def begin_step(
    rows: torch.Tensor,
    starts: torch.Tensor,
    columns: RowColumns,
    out: StepTensors,
    counts: torch.Tensor | None = None,
) -> None:
    """The same as `reference.begin_step`: int32 [R], int32 [R + 1], int32 [R]."""
    begin_step_kernel[(len(rows),)](
        rows,
        starts,
        counts,
        columns.num_computed,
        columns.num_tokens,
        columns.flat_token_ids,
        columns.block_table,
        out.input_ids,
        out.positions,
        out.slots,
        out.lengths,
        out.targets,
        out.rows,
        out.seq_lens,
        out.more_slots,
        len(columns.flat_token_ids) - 2,
        out.more_slots.stride(0),
        ROWS=len(columns.num_computed),
        G=1 + len(out.more_slots),
        WIDTH=columns.width,
        MAX_BLOCKS=columns.block_table.shape[1],
        S=columns.block_size,
        BT=_TILE_TOKENS,
        num_warps=1,
    )
