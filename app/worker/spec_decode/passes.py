"""The passes of a drafter behind a step's tokens: where their tokens lie, for its own attention layers.

A pass brings each of N rows a token behind those it knows, or a block of them. Its place in the KV cache is the one
that the row's later token will have, if the row has a block there already (`RowColumns.num_blocks`): else it is not
kept, and the drafts after it are guessed without it. Rows that only pad keep nothing.
"""

from __future__ import annotations

import torch

from app.kernels.attention import AttentionMetadata
from app.kernels.drafts import PLACE_DRAFTS
from app.kernels.drafts.reference import tables_of
from app.layers.context import ForwardContext
from app.worker.spec_decode.base import Proposal

MOST_AHEAD = 33  # positions that a pass may lie behind the step's tokens


class DraftPasses:
    """Those of one proposal; each has `each` tokens of a row, a request with one query to attention."""

    def __init__(self, proposal: Proposal, each: int = 1, longest: int | None = None) -> None:
        """`longest`: tokens of a context up to which the drafter computes all layers at once; None: of any."""
        self._proposal, self._each = proposal, each
        # A captured pass has rows of any length.
        is_static = proposal.ctx.attention[0].is_static
        self._by_layers = is_static and longest is not None and longest < proposal.columns.width
        rows, device = proposal.rows, proposal.rows.device
        if each > 1:
            rows = rows.repeat_interleave(each)
        self._tables = tables_of(proposal.columns, rows)
        self._step_rows = rows.int()
        self._starts = torch.arange(len(rows) + 1, dtype=torch.int32, device=device)
        self._place = PLACE_DRAFTS.on(device)

    def context(self, ahead: int, *, sees_block: bool = False) -> ForwardContext:
        """A pass over the positions from `ahead` behind each row's last of the step on, of which each token sees those
        before it and its own; `sees_block`: all of its row."""
        proposal = self._proposal
        step, columns, tokens = proposal.ctx.attention[0], proposal.columns, proposal.view.tensors
        places = self._place(columns, proposal.rows, tokens, proposal.ends, ahead, self._each, sees_block=sees_block)
        meta = AttentionMetadata(
            query_start_loc=self._starts,
            seq_lens=places.seq_lens,
            block_table=self._tables[0],
            slot_mapping=places.slots[0],
            max_query_len=1,
            max_seq_len=min(step.max_seq_len + MOST_AHEAD, columns.width),
            num_decodes=len(places.positions),
            is_static=step.is_static,
            by_layers=self._by_layers,
            more_tables=tuple(zip(self._tables[1:], places.slots[1:], strict=True)),
            rows=self._step_rows,
        )
        return proposal.plan(places.positions, meta)
