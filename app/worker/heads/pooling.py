"""The head of pooling models: results of the prompts that end in a step."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from app.layers.context import ForwardContext, HiddenStates
from app.records.step import SchedulerOutput
from app.worker.heads.base import Head
from app.worker.pooling.pooler import Pooler
from app.worker.rows.input_batch import InputBatch
from app.worker.rows.pending_step import PooledRows, StepResults
from app.worker.rows.worker_feature import WorkerFeature


class PoolingHead(Head):
    """The head of a pooling model: the pooler."""

    def __init__(self, pooler: Pooler, device: torch.device) -> None:
        super().__init__(device)
        self._pooler = pooler

    @property
    def features(self) -> Sequence[WorkerFeature]:
        """The features of this head: the pooler."""
        return [self._pooler]

    def finish(
        self, step: SchedulerOutput, batch: InputBatch, hidden: HiddenStates, ctx: ForwardContext | None
    ) -> StepResults:
        """Pool each row's tokens; rows go on or end."""
        results = self.empty(step.step_id)
        host = batch.host
        lengths = host.first_positions + step.num_scheduled_tokens
        results.pooled = self._pooler.compute(host.rows.tolist(), step.samples, host.starts, lengths, hidden.last)
        return results

    def empty(self, step_id: int) -> StepResults:
        """The result of a step in which no prompt ends."""
        results = super().empty(step_id)
        results.pooled = PooledRows(0)
        return results
