"""The ends of steps with drafts, in plain PyTorch: the truth, and the CPU path.

Rows below 0 pad a step over static tensors: they are read as row 0, and nothing of them is written.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from app.kernels.drafts import LogitsPlaces, PassPlaces
from app.kernels.rows import RowColumns, StepTensors


def accept_drafts(
    columns: RowColumns,
    rows: torch.Tensor,
    places: LogitsPlaces | None,
    targets: torch.Tensor,
    token_ids: torch.Tensor,
    vocab_size: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The contract of `app.kernels.drafts.AcceptDrafts`, on any device."""
    token_ids = token_ids.clamp(0, vocab_size - 1)
    if places is None:
        firsts = torch.arange(len(rows), device=rows.device)
        accepted = torch.zeros_like(firsts)
    else:
        firsts, num_drafts = places.firsts.long(), places.counts.long() - 1
        numbers = torch.arange(int(num_drafts.max()), device=firsts.device)
        exists = numbers < num_drafts[:, None]
        drafts = (firsts[:, None] + numbers).clamp(max=len(targets) - 1)
        matches = exists & (columns.flat_token_ids[targets[drafts]] == token_ids[drafts])
        accepted = matches.long().cumprod(dim=1).sum(dim=1)
        take_back(columns, rows.long(), num_drafts - accepted)
    columns.flat_token_ids.index_copy_(0, targets, token_ids.int())
    return accepted + 1, firsts + accepted


def take_back(columns: RowColumns, rows: torch.Tensor, num_rejected: torch.Tensor) -> None:
    """Rows int64 [N] were counted with so many drafts [N] that are none of their tokens."""
    rejected = torch.where(rows >= 0, num_rejected, 0).int()
    rows = rows.clamp(min=0)
    columns.num_computed.index_add_(0, rows, rejected, alpha=-1)  # what pads adds 0, whatever else is row 0
    columns.num_tokens.index_add_(0, rows, rejected, alpha=-1)


def write_drafts(columns: RowColumns, rows: torch.Tensor, drafts: torch.Tensor) -> None:
    """The contract of `app.kernels.drafts.WriteDrafts`, on any device."""
    rows = rows.long()
    known = columns.num_tokens[rows.clamp(min=0)].long()
    positions = known[:, None] + torch.arange(drafts.shape[1], device=drafts.device)
    write_tokens(columns, rows, positions, drafts)


def write_tokens(columns: RowColumns, rows: torch.Tensor, positions: torch.Tensor, token_ids: torch.Tensor) -> None:
    """token_ids [N, P] at positions int64 [N, P] of rows int64 [N]; those past a row's end are dropped."""
    spare = len(columns.flat_token_ids) - 1
    exists = (rows >= 0)[:, None] & (positions < columns.width)
    places = torch.where(exists, rows[:, None] * columns.width + positions, spare)
    columns.flat_token_ids[places] = token_ids.int()


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
    """The contract of `app.kernels.drafts.PlaceDrafts`, on any device."""
    assert columns.num_blocks is not None
    begins = step.positions[ends] + ahead
    positions = (begins[:, None] + torch.arange(each, device=ends.device)).view(-1)
    of_row = torch.arange(len(rows), device=rows.device).repeat_interleave(each)
    has_block = positions // columns.block_size < columns.num_blocks[rows][of_row]
    exists = (step.slots[ends] >= 0)[of_row] & has_block
    tables = tables_of(columns, rows)
    slots = torch.stack([slots_of(table, of_row, positions, columns.block_size, exists) for table in tables])
    seen = begins[of_row] + each if sees_block else positions + 1
    return PassPlaces(positions, slots, seen.int())


def tables_of(columns: RowColumns, rows: torch.Tensor) -> list[torch.Tensor]:
    """The block table int32 [N, M] of rows int64 [N] for each group of layers."""
    every = columns.block_table.view(-1, len(columns.num_tokens), columns.block_table.shape[1])
    return [table.index_select(0, rows) for table in every]


def slots_of(
    table: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor, size: int, exists: torch.Tensor
) -> torch.Tensor:
    """int64 [T]: the slots of positions [T] of rows [T] of a table [R, M] of blocks; -1 where there is none."""
    width = table.shape[1]
    blocks = table.view(-1)[rows * width + (positions // size).clamp(max=width - 1)].long()
    return torch.where(exists, blocks * size + positions % size, -1)


def continue_ngrams(columns: RowColumns, rows: torch.Tensor, shortest: int, longest: int, count: int) -> torch.Tensor:
    """The contract of `app.kernels.drafts.ContinueNgrams`, on any device."""
    token_ids, known = history(columns, rows)
    first = find_continuation(token_ids, known, shortest, longest)
    ahead = torch.arange(count, device=known.device)
    return token_ids.gather(1, first[:, None] + ahead % (known - first)[:, None]).long()


def find_continuation(token_ids: torch.Tensor, known: torch.Tensor, shortest: int, longest: int) -> torch.Tensor:
    """token_ids int [N, W], of which the first `known` int64 [N] of each row count, at least one -> int64 [N], where
    what followed the match begins; the newest token's place where nothing matched. `longest` must be at most W."""
    width = token_ids.shape[1]
    places = torch.arange(1, width + 1, device=token_ids.device)  # behind each token
    matches = places < known[:, None]
    first = known - 1
    for length in range(1, longest + 1):
        newest = (known - length)[:, None]
        wanted = token_ids.gather(1, newest.clamp(min=0))
        matches[:, length - 1 :] &= token_ids[:, : width - length + 1] == wanted
        matches[:, : length - 1] = False  # would begin before the row does
        if length >= shortest:
            latest = torch.where(matches, places, 0).amax(dim=1)
            first = torch.where(latest > 0, latest, first)
    return first


def history(columns: RowColumns, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows' token ids [N, W], and how many of each are known, int64 [N]."""
    every = columns.flat_token_ids[: len(columns.num_tokens) * columns.width].view(-1, columns.width)
    return every.index_select(0, rows), columns.num_tokens.index_select(0, rows).long()


def repeat_parameters(parameters: Sequence[torch.Tensor], each: int) -> tuple[torch.Tensor, ...]:
    """The contract of `app.kernels.drafts.RepeatParameters`, on any device."""
    return tuple(one.repeat_interleave(each, dim=0) for one in parameters)
