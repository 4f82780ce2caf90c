"""A step as flat tensors: T tokens of R requests side by side, without a Python loop over either.

Positions and slots follow from counts that the host knows (I1), so they are worked out in numpy and sent in one
transfer; the token ids are gathered on the device, where tokens sampled a moment ago already are (I2).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from app.engine.step import SchedulerOutput
from app.engine.to_device import to_device
from app.engine.worker.row_state import RowState
from app.kernels.attention import AttentionMetadata

Int64Array = NDArray[np.int64]


@dataclass(slots=True, frozen=True)
class InputBatch:
    """Inputs of one forward pass, and where its results go."""

    input_ids: torch.Tensor  # int32 [T]
    positions: torch.Tensor  # int64 [T]
    attention: AttentionMetadata
    rows: Int64Array  # [R]
    logits_indices: torch.Tensor  # int64 [N]: the last token of each row that samples
    sample_rows: Int64Array  # [N]
    sample_lengths: Int64Array  # [N] tokens before the new one = absolute position of the new one
    device_sample_lengths: torch.Tensor  # int64 [N]
    query_start_loc: Int64Array  # [R + 1], on the host
    first_positions: Int64Array  # [R], position of each request's first token in the step
    layer_inputs: dict[str, torch.Tensor] = field(default_factory=dict)  # what features have for layers, [T, ...]


def build_input_batch(step: SchedulerOutput, state: RowState) -> InputBatch:
    """Inputs of a step with at least one row, whose diffs were applied to `state`."""
    rows, counts = step.rows.astype(np.int64), step.num_scheduled_tokens.astype(np.int64)
    computed = state.num_computed_tokens[rows]
    seq_lens = computed + counts
    starts = np.zeros(len(rows) + 1, dtype=np.int64)
    np.cumsum(counts, out=starts[1:])
    check_rows(state, rows, counts, seq_lens, step.samples)
    if starts[-1] == len(rows):  # one token each
        token_rows, positions = rows, computed
    else:
        token_rows = np.repeat(rows, counts)
        positions = np.arange(starts[-1]) + np.repeat(computed - starts[:-1], counts)
    size = state.block_size
    slots = state.host_block_table[token_rows, positions // size] * np.int64(size) + positions % size
    sample_rows = rows[step.samples]
    sample_lengths = state.num_tokens[sample_rows]
    history = token_rows * state.token_ids.shape[1] + positions
    tensors = _send(
        [history, positions, slots, rows, starts, seq_lens, starts[1:][step.samples] - 1, sample_lengths],
        state.device,
    )
    device_history, device_positions, device_slots, device_rows, device_starts, device_lens, indices, lengths = tensors
    return InputBatch(
        input_ids=state.token_ids.view(-1)[device_history],
        positions=device_positions,
        attention=_metadata(state, counts, seq_lens, starts, (device_rows, device_starts, device_lens, device_slots)),
        rows=rows,
        logits_indices=indices,
        sample_rows=sample_rows,
        sample_lengths=sample_lengths,
        device_sample_lengths=lengths,
        query_start_loc=starts,
        first_positions=computed,
    )


def check_rows(
    state: RowState, rows: Int64Array, counts: NDArray[Any], seq_lens: Int64Array, samples: NDArray[np.bool_]
) -> None:
    """A step message that breaks these would spoil other requests' cache without a trace."""
    assert (counts > 0).all(), "a scheduled row brings no token"
    assert (seq_lens <= state.num_blocks[rows] * state.block_size).all(), "a row lacks blocks for its tokens"
    assert ((seq_lens == state.num_tokens[rows]) == samples).all(), "rows sample exactly at the end of what is known"


def _metadata(
    state: RowState,
    counts: Int64Array,
    seq_lens: Int64Array,
    host_starts: Int64Array,
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
) -> AttentionMetadata:
    """`tensors`: rows, starts, seq_lens and slots on the device."""
    rows, starts, lens, slots = tensors
    longest = int(seq_lens.max())
    max_blocks = -(-longest // state.block_size)
    longer = np.flatnonzero(counts > 1)
    return AttentionMetadata(
        query_start_loc=starts.int(),
        seq_lens=lens.int(),
        block_table=state.block_table[:, :max_blocks].index_select(0, rows),
        slot_mapping=slots,
        max_query_len=int(counts.max()),
        max_seq_len=longest,
        num_decodes=int(longer[0]) if len(longer) else len(counts),
        host_starts=host_starts,
    )


def _send(arrays: list[Int64Array], device: torch.device) -> list[torch.Tensor]:
    """int64 arrays to tensors; on a GPU in one transfer from pinned memory."""
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    joined = to_device(np.concatenate(arrays), device)
    return list(joined.split([len(array) for array in arrays]))  # type: ignore[no-untyped-call]
