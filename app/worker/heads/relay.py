"""The head of a pipeline stage that is not the last: hidden states go on to the next one, which ends the step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from app.distributed.stage_link import StageLink
from app.layers.context import ForwardContext, HiddenStates
from app.records.step import SchedulerOutput
from app.worker.features.token_feedback import TokenFeedback
from app.worker.graphs.static_step import Static, StepKey
from app.worker.heads.base import Head
from app.worker.rows.input_batch import InputBatch
from app.worker.rows.pending_step import StepResults
from app.worker.rows.row_state import RowState
from app.worker.rows.worker_feature import WorkerFeature
from app.worker.spec_decode.drafted_states import RelayedStates


class RelayHead(Head):
    """The first stage embeds the tokens that the last one samples, so it expects them back. Where drafts are verified,
    every stage must hear how many a row got."""

    def __init__(
        self, link: StageLink, state: RowState, num_draft_tokens: int = 0, states: RelayedStates | None = None
    ) -> None:
        """`states`: of the stage's layers, where drafts are verified."""
        super().__init__(state.device)
        self._link = link
        listens = link.is_first or num_draft_tokens > 0
        self._feedback = TokenFeedback(link, state, num_draft_tokens, states) if listens else None

    @property
    def features(self) -> Sequence[WorkerFeature]:
        """Token feedback, where it is needed."""
        return [] if self._feedback is None else [self._feedback]

    def finish(
        self, step: SchedulerOutput, batch: InputBatch, hidden: HiddenStates, ctx: ForwardContext | None
    ) -> StepResults:
        """Nothing is left to do: `ForwardPass.run` has sent the hidden states."""
        return self._elsewhere(step.step_id, batch.sampled.rows, batch.sampled.num_drafts)

    def finish_static(
        self,
        step: SchedulerOutput,
        static: Static,
        key: StepKey,
        rows: NDArray[np.int64],
        seq_lens: NDArray[np.int64],
    ) -> StepResults:
        """Send the hidden states, which lie in a static tensor."""
        inner = static.step
        assert inner.sent is not None
        sent = inner.sent[inner.filled(key, step.num_scheduled_tokens)]
        self._link.send_hidden(sent.clone())  # the next step may overwrite it before it has left
        drafts = None if step.num_draft_tokens is None else step.num_draft_tokens.astype(np.int64)
        return self._elsewhere(step.step_id, rows, drafts, holds_all=inner.places_each(key) > 1)

    def _elsewhere(
        self, step_id: int, rows: NDArray[np.int64], num_drafts: NDArray[np.int64] | None, *, holds_all: bool = False
    ) -> StepResults:
        """The empty result; the last stage will send the tokens of `rows`."""
        if self._feedback is not None:
            self._feedback.expect(rows, num_drafts, holds_all=holds_all)
        return self.empty(step_id)
