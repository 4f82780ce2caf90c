# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""The ends of steps with drafts, each operation in one launch of one program a row."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from app.kernels.drafts import MOST_PLACES, LogitsPlaces, PassPlaces
from app.kernels.quick_launch import quick_launch
from app.kernels.rows import RowColumns, StepTensors


@quick_launch
@triton.jit(
    do_not_specialize=["V"],
    do_not_specialize_on_alignment=["p_rows", "p_firsts", "p_counts", "p_targets", "p_sampled"],
)
def accept_kernel(
    p_rows, p_firsts, p_counts, p_targets, p_sampled, p_token_ids, p_num_computed, p_num_tokens, p_num_new, p_last, V,
    BP: tl.constexpr,
):  # fmt: skip
    """Grid (N,), one warp each: all of its threads have read drafts and counts before one of them writes."""
    i_n = tl.program_id(0)
    b_row = tl.load(p_rows + i_n).to(tl.int64)
    b_first = i_n.to(tl.int64)
    b_count = 1
    if p_firsts is not None:
        b_first = tl.load(p_firsts + i_n).to(tl.int64)
        b_count = tl.load(p_counts + i_n)
    o_place = tl.arange(0, BP)
    m_place = o_place < b_count
    b_target = tl.load(p_targets + b_first + o_place, mask=m_place, other=0)
    b_told = tl.load(p_token_ids + b_target, mask=m_place, other=-1)
    b_token = tl.load(p_sampled + b_first + o_place, mask=m_place, other=0)
    b_token = tl.minimum(tl.maximum(b_token, 0), V - 1).to(tl.int32)
    is_right = (o_place < b_count - 1) & (b_told == b_token)
    b_accepted = tl.min(tl.where(is_right, BP, o_place), 0)
    b_rejected = b_count - 1 - b_accepted
    is_live = b_row >= 0
    b_row = tl.maximum(b_row, 0)
    b_computed = tl.load(p_num_computed + b_row)
    b_known = tl.load(p_num_tokens + b_row)
    tl.debug_barrier()
    tl.store(p_token_ids + b_target, b_token, mask=m_place)
    tl.store(p_num_computed + b_row, b_computed - b_rejected, mask=is_live)
    tl.store(p_num_tokens + b_row, b_known - b_rejected, mask=is_live)
    tl.store(p_num_new + i_n, (b_accepted + 1).to(tl.int64))
    tl.store(p_last + i_n, b_first + b_accepted)


def accept_drafts(
    columns: RowColumns,
    rows: torch.Tensor,
    places: LogitsPlaces | None,
    targets: torch.Tensor,
    token_ids: torch.Tensor,
    vocab_size: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same as `reference.accept_drafts`."""
    num_new, last = torch.zeros(2, len(rows), dtype=torch.int64, device=rows.device)  # indices where no kernel runs
    if len(rows):
        accept_kernel[(len(rows),)](
            rows,
            None if places is None else places.firsts,
            None if places is None else places.counts,
            targets,
            token_ids,
            columns.flat_token_ids,
            columns.num_computed,
            columns.num_tokens,
            num_new,
            last,
            vocab_size,
            BP=MOST_PLACES,
            num_warps=1,
        )
    return num_new, last


@quick_launch
@triton.jit(do_not_specialize=["P"], do_not_specialize_on_alignment=["p_rows", "p_drafts"])
def write_kernel(p_rows, p_drafts, p_num_tokens, p_token_ids, P, WIDTH: tl.constexpr, BP: tl.constexpr):
    """Grid (N,)."""
    i_n = tl.program_id(0).to(tl.int64)
    b_row = tl.load(p_rows + i_n).to(tl.int64)
    b_known = tl.load(p_num_tokens + tl.maximum(b_row, 0))
    o_draft = tl.arange(0, BP)
    b_position = b_known + o_draft
    m_draft = (o_draft < P) & (b_position < WIDTH) & (b_row >= 0)
    b_draft = tl.load(p_drafts + i_n * P + o_draft, mask=m_draft, other=0).to(tl.int32)
    tl.store(p_token_ids + b_row * WIDTH + b_position, b_draft, mask=m_draft)


def write_drafts(columns: RowColumns, rows: torch.Tensor, drafts: torch.Tensor) -> None:
    """The same as `reference.write_drafts`."""
    if drafts.numel():
        write_kernel[(len(rows),)](
            rows,
            drafts.contiguous(),
            columns.num_tokens,
            columns.flat_token_ids,
            drafts.shape[1],
            WIDTH=columns.width,
            BP=MOST_PLACES,
            num_warps=1,
        )


@quick_launch
@triton.jit(
    do_not_specialize=["ahead", "each", "stride_slots"],
    do_not_specialize_on_alignment=["p_rows", "p_ends", "p_step_positions", "p_step_slots"],
)
def place_kernel(
    p_rows, p_ends, p_step_positions, p_step_slots, p_num_blocks, p_block_table, p_positions, p_slots, p_seq_lens,
    ahead, each, stride_slots,
    SEES_BLOCK: tl.constexpr, ROWS: tl.constexpr, G: tl.constexpr, MAX_BLOCKS: tl.constexpr, S: tl.constexpr,
    BE: tl.constexpr,
):  # fmt: skip
    """Grid (N,)."""
    i_n = tl.program_id(0).to(tl.int64)
    b_row = tl.load(p_rows + i_n).to(tl.int64)
    b_end = tl.load(p_ends + i_n)
    b_begin = tl.load(p_step_positions + b_end) + ahead
    o_token = tl.arange(0, BE)
    m_token = o_token < each
    b_position = b_begin + o_token
    b_place = b_position // S
    exists = (tl.load(p_step_slots + b_end) >= 0) & (b_place < tl.load(p_num_blocks + b_row))
    o_out = i_n * each + o_token
    for i_g in tl.static_range(G):
        p_entry = p_block_table + (i_g * ROWS + b_row) * MAX_BLOCKS + tl.minimum(b_place, MAX_BLOCKS - 1)
        b_slot = tl.load(p_entry, mask=m_token, other=0).to(tl.int64) * S + b_position % S
        tl.store(p_slots + i_g * stride_slots + o_out, tl.where(exists, b_slot, -1), mask=m_token)
    tl.store(p_positions + o_out, b_position, mask=m_token)
    b_seen = b_position + 1
    if SEES_BLOCK:
        b_seen = b_begin + each + o_token * 0
    tl.store(p_seq_lens + o_out, b_seen.to(tl.int32), mask=m_token)


def place_drafts(
    columns: RowColumns,
    rows: torch.Tensor,
    step: StepTensors,
    ends: torch.Tensor,
    ahead: int,
    each: int,
    *,
    sees_block: bool,
) -> PassPlaces:
    """The same as `reference.place_drafts`."""
    assert columns.num_blocks is not None
    count, num_rows = len(rows) * each, len(columns.num_tokens)
    num_groups = len(columns.block_table) // num_rows
    positions = torch.zeros(count, dtype=torch.int64, device=rows.device)  # indices where no kernel runs
    slots = torch.empty(num_groups, count + count % 2, dtype=torch.int64, device=rows.device)
    seq_lens = torch.empty(count, dtype=torch.int32, device=rows.device)
    if count:
        place_kernel[(len(rows),)](
            rows,
            ends,
            step.positions,
            step.slots,
            columns.num_blocks,
            columns.block_table,
            positions,
            slots,
            seq_lens,
            ahead,
            each,
            slots.stride(0),
            SEES_BLOCK=sees_block,
            ROWS=num_rows,
            G=num_groups,
            MAX_BLOCKS=columns.block_table.shape[1],
            S=columns.block_size,
            BE=MOST_PLACES,
            num_warps=1,
        )
    return PassPlaces(positions, slots[:, :count], seq_lens)


@quick_launch
@triton.jit(
    do_not_specialize=["each"],
    do_not_specialize_on_alignment=["p_temperature", "p_top_k", "p_top_p", "p_min_p", "p_keys"],
)
def repeat_kernel(
    p_temperature, p_top_k, p_top_p, p_min_p, p_keys, p_temperatures, p_top_ks, p_top_ps, p_min_ps, p_all_keys, each,
    BE: tl.constexpr,
):  # fmt: skip
    """Grid (N,)."""
    i_n = tl.program_id(0).to(tl.int64)
    o_place = tl.arange(0, BE)
    m_place, o_out = o_place < each, i_n * each + o_place
    tl.store(p_temperatures + o_out, tl.load(p_temperature + i_n), mask=m_place)
    tl.store(p_top_ks + o_out, tl.load(p_top_k + i_n), mask=m_place)
    tl.store(p_top_ps + o_out, tl.load(p_top_p + i_n), mask=m_place)
    tl.store(p_min_ps + o_out, tl.load(p_min_p + i_n), mask=m_place)
    tl.store(p_all_keys + 2 * o_out, tl.load(p_keys + 2 * i_n), mask=m_place)
    tl.store(p_all_keys + 2 * o_out + 1, tl.load(p_keys + 2 * i_n + 1), mask=m_place)


def repeat_parameters(parameters: Sequence[torch.Tensor], each: int) -> tuple[torch.Tensor, ...]:
    """The same as `reference.repeat_parameters`."""
    count = len(parameters[0])
    made = tuple(one.new_empty(count * each, *one.shape[1:]) for one in parameters)
    if count:
        repeat_kernel[(count,)](*parameters, *made, each, BE=MOST_PLACES, num_warps=1)
    return made
