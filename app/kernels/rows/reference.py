"""Finds where a step's tokens lie, in plain PyTorch: the truth, and the CPU path."""

from __future__ import annotations

import torch

from app.kernels.rows import RowColumns, StepTensors


def begin_step(
    rows: torch.Tensor,
    starts: torch.Tensor,
    columns: RowColumns,
    out: StepTensors,
    counts: torch.Tensor | None = None,
) -> None:
    """The contract of `app.kernels.rows.begin_step`, on any device."""
    live, places = rows >= 0, starts.diff()
    is_padded = not bool(live.all())
    row = rows.clamp(min=0).long() if is_padded else rows.long()
    computed = columns.num_computed[row] * live
    _fill_tokens(row, computed, starts, columns, out)
    held = places if counts is None else counts
    if is_padded or (counts is not None and not torch.equal(counts, places)):
        _fill_padding(_is_padding(starts, held * live), columns, out)
    after = computed + held
    out.rows.copy_(row)
    out.seq_lens.copy_(computed + places)
    if is_padded:
        row, after = row[live], after[live]
    columns.num_computed[row] = after
    columns.num_tokens[row] = torch.maximum(columns.num_tokens[row], after + 1)


def _fill_tokens(
    row: torch.Tensor, computed: torch.Tensor, starts: torch.Tensor, columns: RowColumns, out: StepTensors
) -> None:
    """`row` int64 [R], `computed` int32 [R]."""
    size, num_tokens = columns.block_size, len(out.positions)
    if num_tokens == len(row):
        positions = computed.long()
    else:
        of_row = torch.repeat_interleave(starts.diff(), output_size=num_tokens)  # [T], which of the R
        positions = torch.arange(num_tokens, device=row.device) + (computed - starts[:-1])[of_row]
        row = row[of_row]
    sources = row * columns.width + positions
    blocks = columns.block_table[row, positions // size]
    torch.add(blocks.long() * size, positions % size, out=out.slots)
    for group, slots in enumerate(out.more_slots, 1):
        blocks = columns.block_table[row + group * len(columns.num_computed), positions // size]
        torch.add(blocks.long() * size, positions % size, out=slots)
    torch.index_select(columns.flat_token_ids, 0, sources, out=out.input_ids)
    torch.add(positions, 1, out=out.lengths)
    torch.add(sources, 1, out=out.targets)
    out.positions.copy_(positions)


def _is_padding(starts: torch.Tensor, held: torch.Tensor) -> torch.Tensor:
    """bool [T]: the places behind the `held` tokens [R] of each row."""
    num_places = int(starts[-1])
    first_behind = torch.repeat_interleave(starts[:-1] + held, starts.diff(), output_size=num_places)
    return torch.arange(num_places, device=starts.device) >= first_behind


def _fill_padding(padding: torch.Tensor, columns: RowColumns, out: StepTensors) -> None:
    """Fills the places where `padding` [T] is True: none of the rows' tokens stands there."""
    spare = len(columns.flat_token_ids) - 2
    out.input_ids[padding] = columns.flat_token_ids[spare]
    out.positions[padding] = 0
    out.lengths[padding] = 1
    out.slots[padding] = -1
    out.more_slots[:, padding] = -1
    out.targets[padding] = spare + 1
