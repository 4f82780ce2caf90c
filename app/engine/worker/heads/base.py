"""What ends a step: a sampler, a pooler, or the way to the next pipeline stage."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from app.engine.row_feature import RowFeature
from app.engine.sampling.sampling_batch import HostParameters
from app.engine.step import SchedulerOutput
from app.engine.worker.graphs.decode_step import Decode
from app.engine.worker.input_batch import InputBatch
from app.engine.worker.pending_step import StepResults


class Head(ABC):
    """From hidden states to what goes back to the host. Used step by step, in their order."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @property
    @abstractmethod
    def features(self) -> Sequence[RowFeature]:
        """What must be told of rows for it, in order."""

    @abstractmethod
    def finish(self, step: SchedulerOutput, batch: InputBatch, hidden: torch.Tensor) -> StepResults:
        """Results of a step with the hidden states [T, C]."""

    def empty(self, step_id: int) -> StepResults:
        """Results of a step that brings no token."""
        return StepResults(step_id, torch.empty(0, dtype=torch.int64, device=self.device))

    # ---- of generating models only: the end of decode steps over static tensors

    def parameters(self, rows: NDArray[np.int64]) -> HostParameters | None:
        """What `Decode.sample` needs to draw for these rows; None: `finish_decode` does without it."""
        raise AssertionError("a head without decode steps")

    def finish_decode(
        self,
        step_id: int,
        decode: Decode,
        size: int,
        rows: NDArray[np.int64],
        lengths: NDArray[np.int64],
        parameters: HostParameters | None,
    ) -> StepResults:
        """Results of a decode step whose forward pass was run at `size` for `rows` [N], each of which gets a token at
        its position of `lengths` [N]."""
        raise AssertionError("a head without decode steps")
