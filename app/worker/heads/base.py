"""The contract of what ends a step: a sampler, a pooler, or the way to the next pipeline stage."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from app.layers.context import ForwardContext, HiddenStates
from app.records.step import SchedulerOutput
from app.worker.graphs.static_step import Static, StepKey
from app.worker.rows.input_batch import InputBatch
from app.worker.rows.pending_step import StepResults
from app.worker.rows.worker_feature import WorkerFeature


class Head(ABC):
    """From hidden states to what goes back to the host. Used step by step, in their order."""

    reads_context: bool = False  # of steps with prompts: layers of its own follow, which may keep what they are given

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @property
    @abstractmethod
    def features(self) -> Sequence[WorkerFeature]:
        """Returns what must be told of rows for it, in order."""

    @abstractmethod
    def finish(
        self, step: SchedulerOutput, batch: InputBatch, hidden: HiddenStates, ctx: ForwardContext | None
    ) -> StepResults:
        """Results of a step with these hidden states; `ctx` is what its layers were given; None: they were replayed,
        and nobody reads it (`reads_context`)."""

    def empty(self, step_id: int) -> StepResults:
        """Results of a step that brings no token."""
        return StepResults(step_id, torch.empty(0, dtype=torch.int64, device=self.device))

    def finish_static(
        self,
        step: SchedulerOutput,
        static: Static,
        key: StepKey,
        rows: NDArray[np.int64],
        seq_lens: NDArray[np.int64],
    ) -> StepResults:
        """Results of a step over static tensors whose forward pass was run by `key` for rows [N]; seq_lens
        [N]: most tokens computed after it of each. Of generating models only."""
        raise AssertionError("a head without steps over static tensors")
