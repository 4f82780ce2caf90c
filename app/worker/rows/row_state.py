"""Permanent rows: what the device knows of each request between steps (I3).

Token ids, block tables and counts live on the device. How many tokens a row has, and how many of them are computed,
only the device knows exactly (app/kernels/rows); the host's counts follow from the step messages alone (I1), and are
upper bounds where drafts may have been rejected of which it has not heard yet: it never has to ask the device.
"""

from __future__ import annotations

import numpy as np
import torch

from app.kernels.rows import BEGIN_STEP, RowColumns
from app.platforms.to_device import to_device
from app.records.step import NewRequest, SchedulerOutput
from app.worker.rows.step_inputs import StepInputs


class RowState:
    """Applies the step messages' diffs: freed rows, new requests, new blocks, in this order."""

    def __init__(
        self,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        device: torch.device,
        num_groups: int = 1,
        inputs: StepInputs | None = None,
    ) -> None:
        """`max_model_len`: tokens of a row, with room for what a step may bring in vain (drafts). `num_groups`: of
        layers that keep blocks of their own; block ids come with one for each group, side by side. `inputs`: lines that
        were declared before."""
        self.device = device
        self.block_size = block_size
        self.num_groups = num_groups
        max_blocks = -(-max_model_len // block_size)
        # Upper bounds; `columns` has the counts themselves.
        self.num_tokens = np.ones(max_num_seqs, dtype=np.int64)
        self.num_computed_tokens = np.zeros(max_num_seqs, dtype=np.int64)
        self.num_prompt_tokens = np.zeros(max_num_seqs, dtype=np.int64)
        self.num_blocks = np.zeros(max_num_seqs, dtype=np.int64)
        # The tables of all rows, once for each group: row r of group g is number g * max_num_seqs + r.
        self.host_block_table = np.zeros((num_groups * max_num_seqs, max_blocks), dtype=np.int32)
        # All rows' tokens and, behind them, two entries for the rows that only pad a step (app/kernels/rows).
        self.spare = max_num_seqs * max_model_len
        self.flat_token_ids = torch.zeros(self.spare + 2, dtype=torch.int32, device=device)
        self.token_ids = self.flat_token_ids[: self.spare].view(max_num_seqs, max_model_len)
        # On a CPU both tables are the same memory.
        self.block_table = torch.from_numpy(self.host_block_table).to(device)
        self.block_tables = list(self.block_table.view(num_groups, max_num_seqs, max_blocks))  # [rows, M] a group
        counts = torch.zeros(2, max_num_seqs, dtype=torch.int32, device=device)
        counts[1] = 1  # so that what pads a step over rows that had no request yet may look for its newest token
        # On a CPU the same memory, too.
        num_blocks = torch.from_numpy(self.num_blocks).to(device)
        self.columns = RowColumns(
            counts[0], counts[1], self.flat_token_ids, self.block_table, max_model_len, block_size, num_blocks
        )
        self.begin_step = BEGIN_STEP.on(device)
        self.inputs = inputs or StepInputs(max_num_seqs)  # what else the rows bring to a step
        self.num_entered = 0  # requests so far: rows with other requests than before are told apart by it
        self._changed: list[tuple[int, int, int]] = []  # (row of the table, first, end) not yet on the device

    def apply(self, step_message: SchedulerOutput) -> None:
        """Take over a step message's diffs. A freed row has no blocks, so a step of it is noticed."""
        for row in step_message.freed_rows:
            self.num_tokens[row] = self.num_computed_tokens[row] = self.num_blocks[row] = 0
        for row, count in step_message.rejected_drafts:
            self.num_tokens[row] -= count
            self.num_computed_tokens[row] -= count
        for request in step_message.new_requests:
            self._enter(request)
        if step_message.new_requests:
            self._send_tokens(step_message.new_requests)
            self._send_counts([request.row for request in step_message.new_requests])
        for row, block_ids in step_message.new_blocks:
            self._append_blocks(row, block_ids)
        if self._changed:
            self._send_blocks()

    def advance(self, step_message: SchedulerOutput) -> None:
        """Count as `begin_step` does on the device: the step's tokens are computed, and each row that samples gets one
        token more than it has drafts."""
        rows, samples = step_message.rows, step_message.samples
        self.num_computed_tokens[rows] += step_message.num_scheduled_tokens
        self.num_tokens[rows[samples]] += 1
        if step_message.num_draft_tokens is not None:
            self.num_tokens[rows] += step_message.num_draft_tokens

    def _enter(self, request: NewRequest) -> None:
        row, tokens = request.row, len(request.token_ids)
        self.num_entered += 1
        assert tokens <= self.token_ids.shape[1], f"{tokens} tokens in a row of {self.token_ids.shape[1]}"
        self.num_tokens[row] = tokens
        self.num_prompt_tokens[row] = request.num_prompt_tokens
        self.num_computed_tokens[row] = request.num_computed_tokens
        self.num_blocks[row] = 0
        self._append_blocks(row, request.block_ids)

    def _send_tokens(self, requests: list[NewRequest]) -> None:
        """The tokens of requests that have entered their rows: one transfer, however many they are."""
        if len(requests) == 1:
            row, ids = requests[0].row, requests[0].token_ids
            # A copy: a step message that came by pickle may be read-only.
            self.token_ids[row, : len(ids)] = to_device(np.array(ids, dtype=np.int32), self.device)
            return
        ids = np.concatenate([request.token_ids for request in requests])
        counts = np.array([len(request.token_ids) for request in requests])
        firsts = np.array([request.row for request in requests]) * self.token_ids.shape[1]
        places = np.repeat(firsts - (np.cumsum(counts) - counts), counts) + np.arange(len(ids))
        device_places, device_ids = to_device(np.stack((places, ids)), self.device).unbind()
        self.flat_token_ids[device_places] = device_ids.int()

    def _send_counts(self, rows: list[int]) -> None:
        """The counts of requests that have entered these rows."""
        entries = np.stack((rows, self.num_computed_tokens[rows], self.num_tokens[rows]))
        device_rows, computed, known = to_device(entries, self.device).unbind()
        self.columns.num_computed[device_rows] = computed.int()
        self.columns.num_tokens[device_rows] = known.int()

    def _append_blocks(self, row: int, block_ids: list[int]) -> None:
        first = int(self.num_blocks[row])
        end = first + len(block_ids) // self.num_groups
        for group in range(self.num_groups):
            table_row = group * len(self.num_blocks) + row
            self.host_block_table[table_row, first:end] = block_ids[group :: self.num_groups]
            self._changed.append((table_row, first, end))
        self.num_blocks[row] = end

    def _send_blocks(self) -> None:
        """One transfer for all changed entries."""
        changed, self._changed = self._changed, []
        if self.device.type == "cpu":
            return
        rows = np.concatenate([np.full(end - first, row) for row, first, end in changed])
        columns = np.concatenate([np.arange(first, end) for _, first, end in changed])
        of_row = rows % len(self.num_blocks)
        entries = np.stack((rows, columns, self.host_block_table[rows, columns], of_row, self.num_blocks[of_row]))
        device_entries = to_device(entries, self.device)
        self.block_table[device_entries[0], device_entries[1]] = device_entries[2].int()
        assert self.columns.num_blocks is not None
        self.columns.num_blocks[device_entries[3]] = device_entries[4]
