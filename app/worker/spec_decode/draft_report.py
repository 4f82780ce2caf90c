"""Reports the drafts of rows with a grammar, which the host cuts where the grammar does, and makes masks for.

Such a row computes nothing while a token of it is in flight (I2). So the drafts that come back with its tokens are
those that its next step verifies.
"""

from __future__ import annotations

import numpy as np
import torch

from app.kernels.rows import RowColumns
from app.platforms.to_device import to_device
from app.records.step import NewRequest, SchedulerOutput
from app.worker.rows.pending_step import StepResults
from app.worker.rows.worker_feature import WorkerFeature


class DraftReport(WorkerFeature):
    """Used by the last stage of an engine that drafts."""

    def __init__(self, columns: RowColumns, num_draft_tokens: int) -> None:
        self._columns = columns
        self._ahead = torch.arange(num_draft_tokens, device=columns.num_tokens.device)
        self._has_grammar = np.zeros(len(columns.num_tokens), dtype=np.bool_)

    def enter(self, row: int, request: NewRequest) -> None:
        """A request entered its row."""
        self._has_grammar[row] = request.has_grammar

    def leave(self, row: int) -> None:
        """The row was freed."""
        self._has_grammar[row] = False

    def after(self, step: SchedulerOutput, results: StepResults) -> None:
        """Add the new drafts of the rows with a grammar that sampled; they stand behind the known tokens."""
        rows, ahead = step.rows[step.samples], self._ahead[: step.num_proposed]
        indices = np.flatnonzero(self._has_grammar[rows])
        if not len(indices):
            return
        columns, device_rows = self._columns, to_device(rows[indices].astype(np.int64), self._ahead.device)
        positions = columns.num_tokens[device_rows].long()[:, None] + ahead
        places = device_rows[:, None] * columns.width + positions.clamp(max=columns.width - 1)
        results.draft_indices, results.drafts = indices.astype(np.int32), columns.flat_token_ids[places]
