"""What a proposer is: it guesses the next tokens of rows that have just got theirs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace

import torch

from app.config import EngineConfig
from app.engine.models.base import EngineModel
from app.engine.row_feature import RowFeature
from app.engine.worker.row_state import RowState
from app.engine.worker_info import WorkerInfo


@dataclass(slots=True, frozen=True)
class ProposerContext:
    """What a proposer is made from, on each rank."""

    config: EngineConfig
    model: EngineModel  # this stage's part of it
    state: RowState
    is_last: bool  # the stage that samples and proposes


class Proposer(RowFeature, ABC):
    """A feature of every rank, of which those of the last stage are asked for drafts. They must agree on them."""

    num_draft_tokens: int  # that it proposes for a row, at least 1

    @abstractmethod
    def propose(self, rows: torch.Tensor) -> torch.Tensor:
        """Draft tokens int [N, num_draft_tokens], in the vocabulary, for rows int64 [N], to follow their known tokens.

        Those are all on the device by now: `num_tokens` of them in each row's token ids (app/kernels/rows). A wrong
        guess costs the time to compute it, and nothing else.
        """

    def started(self, info: WorkerInfo) -> WorkerInfo:
        """The scheduler counts on so many drafts of each row."""
        return replace(info, num_draft_tokens=self.num_draft_tokens)
