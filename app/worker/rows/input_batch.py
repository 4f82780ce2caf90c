"""A step as flat tensors: T tokens of R requests side by side, without a Python loop over either.

The host sends rows and how many tokens each of them brings, in one transfer; positions, slots and lengths are made of
the device's own counts by the step's first kernel (app/kernels/rows), and so are the token ids, which were sampled
there a moment ago (I2). What the host says of lengths here are upper bounds (see RowState), exact for prompts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from app.kernels.attention import AttentionMetadata
from app.kernels.rows import StepTensors
from app.records.step import SchedulerOutput
from app.worker.rows.row_state import RowState
from app.worker.rows.step_inputs import HostRows, Line, StepView, send

Int64Array = NDArray[np.int64]
BASE = tuple(Line(name, torch.int32) for name in ("rows", "starts", "indices", "sampling"))


@dataclass(slots=True, frozen=True)
class SampledRows:
    """The N rows that sample, and their logits rows: one each, and one for each of their draft tokens."""

    rows: Int64Array  # [N]
    num_drafts: Int64Array | None  # [N]; None: no row has any
    logits_rows: Int64Array  # [L] the row of each logits row
    lengths: Int64Array  # [L] most tokens before the one to be sampled = its absolute position
    indices: Int64Array  # [L] into the step's tokens

    @classmethod
    def of(cls, step: SchedulerOutput, ends: Int64Array, seq_lens: Int64Array) -> SampledRows:
        """`ends` int64 [R]: behind each row's tokens in the step; `seq_lens` [R]: most tokens computed after it."""
        samples = step.samples
        rows, ends, lengths = step.rows[samples].astype(np.int64), ends[samples], seq_lens[samples]
        if step.num_draft_tokens is None:
            return cls(rows, None, rows, lengths, ends - 1)
        drafts = step.num_draft_tokens[samples].astype(np.int64)
        of_row = np.repeat(np.arange(len(rows)), drafts + 1)
        back = np.concatenate([np.arange(count, -1, -1) for count in drafts.tolist()] or [drafts])
        return cls(rows, drafts, rows[of_row], lengths[of_row] - back, ends[of_row] - 1 - back)


@dataclass(slots=True, frozen=True)
class InputBatch:
    """Inputs of one forward pass, and where its results go."""

    input_ids: torch.Tensor  # int32 [T]
    positions: torch.Tensor  # int64 [T]
    attention: AttentionMetadata
    host: HostRows
    view: StepView
    sampled: SampledRows
    sampling: torch.Tensor  # int32 [N]: which of the step's rows sample
    logits_indices: torch.Tensor  # int64 [L]: the tokens of the step behind which one is sampled
    device_lengths: torch.Tensor  # int64 [L] tokens before the new one = absolute position of the new one
    targets: torch.Tensor  # int64 [L] its place in RowState.flat_token_ids

    @property
    def ends(self) -> torch.Tensor | None:
        """int32 [R]: the last token of each row; None: no row has several."""
        return None if len(self.positions) == len(self.host.rows) else self.view.starts[1:] - 1


def build_input_batch(step: SchedulerOutput, state: RowState) -> InputBatch:
    """Inputs of a step with at least one row, whose diffs were applied to `state`; moves the device's counts on."""
    rows, counts = step.rows.astype(np.int64), step.num_scheduled_tokens.astype(np.int64)
    computed = state.num_computed_tokens[rows]
    seq_lens = computed + counts
    starts = np.zeros(len(rows) + 1, dtype=np.int64)
    np.cumsum(counts, out=starts[1:])
    check_rows(state, step, seq_lens)
    sampled = SampledRows.of(step, starts[1:], seq_lens)
    lines: list[Line] = [*BASE]
    arrays: list[NDArray[Any]] = [step.rows, starts, sampled.indices, np.flatnonzero(step.samples)]
    for entry in state.inputs.for_layers:
        lines.append(entry.line)
        arrays.append(entry.values[rows])
    sent = send(lines, arrays, state.device)
    tensors = StepTensors.empty(int(starts[-1]), len(rows), state.device, state.num_groups)
    state.begin_step(sent["rows"], sent["starts"], state.columns, tensors)
    host = HostRows(rows, starts, computed)
    indices = sent["indices"].long()
    return InputBatch(
        input_ids=tensors.input_ids,
        positions=tensors.positions,
        attention=_metadata(state, tensors, sent["starts"], starts, seq_lens, _drafted(step)),
        host=host,
        view=StepView(tensors, sent["starts"], sent, host),
        sampled=sampled,
        sampling=sent["sampling"],
        logits_indices=indices,
        device_lengths=tensors.lengths[indices],
        targets=tensors.targets[indices],
    )


def check_rows(state: RowState, step: SchedulerOutput, seq_lens: Int64Array) -> None:
    """A step message that breaks these would spoil other requests' cache without a trace."""
    rows, known = step.rows, state.num_tokens[step.rows]
    if step.num_draft_tokens is not None:
        known = known + step.num_draft_tokens
    assert (step.num_scheduled_tokens > 0).all(), "a scheduled row brings no token"
    assert (seq_lens <= state.num_blocks[rows] * state.block_size).all(), "a row lacks blocks for its tokens"
    assert ((seq_lens == known) == step.samples).all(), "rows sample exactly at the end of what is known"


def _drafted(step: SchedulerOutput) -> Int64Array | None:
    """Finds which of the step's rows bring drafts."""
    if step.num_draft_tokens is None:
        return None
    found = np.flatnonzero(step.num_draft_tokens).astype(np.int64)
    return found if len(found) else None


def _metadata(
    state: RowState,
    tensors: StepTensors,
    device_starts: torch.Tensor,
    starts: Int64Array,
    seq_lens: Int64Array,
    drafted: Int64Array | None,
) -> AttentionMetadata:
    """`seq_lens` [R]: most tokens that each of the rows may have computed after the step."""
    counts, longest = np.diff(starts), int(seq_lens.max())
    longer = np.flatnonzero(counts > 1)
    max_blocks = -(-longest // state.block_size)
    table, *more = (table[:, :max_blocks].index_select(0, tensors.rows) for table in state.block_tables)
    return AttentionMetadata(
        query_start_loc=device_starts,
        seq_lens=tensors.seq_lens,
        block_table=table,
        slot_mapping=tensors.slots,
        max_query_len=int(counts.max()),
        max_seq_len=longest,
        num_decodes=int(longer[0]) if len(longer) else len(counts),
        host_starts=starts,
        host_lens=seq_lens,
        more_tables=tuple(zip(more, tensors.more_slots, strict=True)),
        rows=tensors.rows,
        drafted=drafted,
    )
