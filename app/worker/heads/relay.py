"""The head of a pipeline stage that is not the last: hidden states go on to the next one, which ends the step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from app.engine.distributed.stage_link import StageLink
from app.engine.row_feature import RowFeature
from app.engine.sampling.sampling_batch import HostParameters
from app.engine.step import SchedulerOutput
from app.engine.worker.features.token_feedback import TokenFeedback
from app.engine.worker.graphs.decode_step import Decode
from app.engine.worker.heads.base import Head
from app.engine.worker.input_batch import InputBatch
from app.engine.worker.pending_step import StepResults
from app.engine.worker.row_state import RowState


class RelayHead(Head):
    """The first stage embeds the tokens that the last one samples, so it expects them back. Where drafts are verified,
    every stage must hear how many a row got."""

    def __init__(self, link: StageLink, state: RowState, num_draft_tokens: int = 0) -> None:
        super().__init__(state.device)
        self._link = link
        listens = link.is_first or num_draft_tokens > 0
        self._feedback = TokenFeedback(link, state, num_draft_tokens) if listens else None

    @property
    def features(self) -> Sequence[RowFeature]:
        """Token feedback, where it is needed."""
        return [] if self._feedback is None else [self._feedback]

    def finish(self, step: SchedulerOutput, batch: InputBatch, hidden: torch.Tensor) -> StepResults:
        """Nothing is left to do: `ForwardPass.run` has sent the hidden states."""
        return self._elsewhere(step.step_id, batch.sampled.rows, batch.sampled.num_drafts)

    def parameters(self, rows: NDArray[np.int64]) -> HostParameters | None:
        """Nothing is sampled here."""
        return None

    def finish_decode(
        self,
        step_id: int,
        decode: Decode,
        size: int,
        rows: NDArray[np.int64],
        lengths: NDArray[np.int64],
        parameters: HostParameters | None,
    ) -> StepResults:
        """Send the hidden states, which lie in a static tensor."""
        sent = decode.step.sent
        assert sent is not None
        self._link.send_hidden(sent[: len(rows)].clone())  # the next step may overwrite it before it has left
        return self._elsewhere(step_id, rows, None)

    def _elsewhere(self, step_id: int, rows: NDArray[np.int64], num_drafts: NDArray[np.int64] | None) -> StepResults:
        """The empty result; the last stage will send the tokens of `rows`."""
        if self._feedback is not None:
            self._feedback.expect(rows, num_drafts)
        return self.empty(step_id)
