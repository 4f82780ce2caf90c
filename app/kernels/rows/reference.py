"""Where a step's tokens lie, in plain PyTorch: the truth, and the CPU path."""

from __future__ import annotations

import torch

from app.kernels.rows import RowColumns, StepTensors


def begin_step(rows: torch.Tensor, starts: torch.Tensor, columns: RowColumns, out: StepTensors) -> None:
    """The contract of `app.kernels.rows.begin_step`, on any device."""
    live = rows >= 0
    is_padded = not bool(live.all())
    row = rows.clamp(min=0).long() if is_padded else rows.long()
    computed = columns.num_computed[row] * live
    _fill_tokens(row, computed, starts, columns, out)
    if is_padded:
        _fill_padding(starts[:-1][~live].long(), columns, out)
    after = computed + starts.diff()
    out.rows.copy_(row)
    out.seq_lens.copy_(after)
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


def _fill_padding(places: torch.Tensor, columns: RowColumns, out: StepTensors) -> None:
    """At `places` in the step stand tokens of padding, whose position is 0."""
    spare = len(columns.flat_token_ids) - 2
    out.input_ids[places] = columns.flat_token_ids[spare]
    out.slots[places] = -1
    out.more_slots[:, places] = -1
    out.targets[places] = spare + 1
