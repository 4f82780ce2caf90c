"""The passes of a drafter behind a step's tokens: where their tokens lie, for its own attention layers.

A pass brings each of N rows a token behind those it knows, or a block of them. Its place in the KV cache is the one
that the row's later token will have, if the row has a block there already (`RowColumns.num_blocks`): else it is not
kept, and the drafts after it are guessed without it. Rows that only pad keep nothing.
"""

from __future__ import annotations

import torch

from app.kernels.attention import AttentionMetadata
from app.kernels.rows import RowColumns
from app.layers.context import ForwardContext
from app.worker.spec_decode.base import Proposal

MOST_AHEAD = 33  # positions that a pass may lie behind the step's tokens


class DraftPasses:
    """Those of one proposal; each has `each` tokens of a row, a request with one query to attention."""

    def __init__(self, proposal: Proposal, each: int = 1) -> None:
        self._proposal, columns = proposal, proposal.columns
        rows, ends = proposal.rows, proposal.ends
        if each > 1:
            rows, ends = (x.repeat_interleave(each) for x in (rows, ends))
        self._exists = proposal.view.tensors.slots[ends] >= 0
        self._tables = tables_of(columns, rows)
        assert columns.num_blocks is not None
        self._num_blocks = columns.num_blocks[rows]
        self._step_rows = rows.int()
        self._rows = torch.arange(len(rows), device=rows.device)
        self._starts = torch.arange(len(rows) + 1, dtype=torch.int32, device=rows.device)

    def context(self, positions: torch.Tensor, seen: torch.Tensor | None = None) -> ForwardContext:
        """A pass over the positions int64 [N * each], which see those before `seen` [N * each]; None: those before them
        and their own."""
        step, size = self._proposal.ctx.attention[0], self._proposal.columns.block_size
        slots = [
            slots_of(table, self._rows, positions, size, self._exists & (positions // size < self._num_blocks))
            for table in self._tables
        ]
        meta = AttentionMetadata(
            query_start_loc=self._starts,
            seq_lens=(positions + 1 if seen is None else seen).int(),
            block_table=self._tables[0],
            slot_mapping=slots[0],
            max_query_len=1,
            max_seq_len=min(step.max_seq_len + MOST_AHEAD, self._proposal.columns.width),
            num_decodes=len(positions),
            is_static=step.is_static,
            more_tables=tuple(zip(self._tables[1:], slots[1:], strict=True)),
            rows=self._step_rows,
        )
        return self._proposal.plan(positions, meta)


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
