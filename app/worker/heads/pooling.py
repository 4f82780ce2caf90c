"""The head of pooling models: results of the prompts that end in a step."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from app.engine.pooling.pooler import Pooler
from app.engine.row_feature import RowFeature
from app.engine.step import SchedulerOutput
from app.engine.worker.heads.base import Head
from app.engine.worker.input_batch import InputBatch
from app.engine.worker.pending_step import StepResults


class PoolingHead(Head):
    """The head of a pooling model: the pooler."""

    def __init__(self, pooler: Pooler, device: torch.device) -> None:
        super().__init__(device)
        self._pooler = pooler

    @property
    def features(self) -> Sequence[RowFeature]:
        """The features of this head: the pooler."""
        return [self._pooler]

    def finish(self, step: SchedulerOutput, batch: InputBatch, hidden: torch.Tensor) -> StepResults:
        """Pool each row's tokens; rows go on or end."""
        results = self.empty(step.step_id)
        lengths = batch.first_positions + step.num_scheduled_tokens
        ends: list[bool] = step.samples.tolist()
        results.pooled = self._pooler.compute(batch.rows.tolist(), ends, batch.query_start_loc, lengths, hidden)
        return results

    def empty(self, step_id: int) -> StepResults:
        """The result of a step in which no prompt ends."""
        results = super().empty(step_id)
        results.pooled = []
        return results
