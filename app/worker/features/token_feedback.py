"""Sampled tokens on their way from the last pipeline stage to the first, which embeds them in a later step.

The first stage goes on with other requests while they travel and takes them in, in the order of the steps, only when
a step needs one of them: the tokens never pass through the driver, and no stage waits for a step that it could
still overlap with another. Tokens that nobody needs (the last ones of their requests) are taken in too, once their
step is older than any that can still be in flight, because the last stage keeps each send until it is received.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from app.distributed.stage_link import StageLink
from app.platforms.to_device import to_device
from app.records.step import SchedulerOutput
from app.worker.rows.row_state import RowState
from app.worker.rows.worker_feature import WorkerFeature
from app.worker.spec_decode.drafted_states import RelayedStates
from app.worker.spec_decode.feedback import unpack, width_of

GONE = -1


@dataclass(slots=True, frozen=True)
class ExpectedTokens:
    """Tokens of one step: row GONE where the request has left its row since."""

    rows: NDArray[np.int64]  # [N]
    num_drafts: NDArray[np.int64]  # [N] that the step verifies
    holds_states: NDArray[np.bool_]  # [N]: where this stage's states are as they were before the step


class TokenFeedback(WorkerFeature):
    """Used by a stage before the last one: `expect` after a step, `before` the next one's message is applied."""

    def __init__(
        self, link: StageLink, state: RowState, num_draft_tokens: int = 0, states: RelayedStates | None = None
    ) -> None:
        """`num_draft_tokens`: that follow the new tokens of each row; `states`: of this stage's layers."""
        self._link = link
        self._state = state
        self._num_draft_tokens = num_draft_tokens
        self._states = states
        self._expected: deque[ExpectedTokens] = deque()

    def expect(self, rows: NDArray[np.int64], num_drafts: NDArray[np.int64] | None, *, holds_all: bool = False) -> None:
        """A step's rows will sample in the last stage; None: they verify no drafts. `holds_all`: the states of all wait
        for how many tokens they get, not of those with drafts alone."""
        if len(rows):
            drafts = np.zeros_like(rows) if num_drafts is None else num_drafts
            self._expected.append(ExpectedTokens(rows.copy(), drafts, (drafts > 0) | holds_all))

    def before(self, step: SchedulerOutput) -> None:
        """Forget tokens of rows that the message frees, then wait for those that its step computes with, and for those
        that the last stage must be rid of."""
        for expected in self._expected:
            expected.rows[np.isin(expected.rows, step.freed_rows)] = GONE
        needed = max(0, len(self._expected) - self._link.max_unread)
        for number, expected in enumerate(self._expected, start=1):
            if np.isin(expected.rows, step.rows).any():
                needed = max(needed, number)
        for _ in range(needed):
            self._take_in(self._expected.popleft())

    def settle(self) -> None:
        """Take in all that is expected: until then the last stage's device may be at work on sending it."""
        while self._expected:
            self._take_in(self._expected.popleft())

    def _take_in(self, expected: ExpectedTokens) -> None:
        k, device, columns = self._num_draft_tokens, self._state.device, self._state.columns
        width = (width_of(k),) if k else ()
        tokens = self._link.receive_tokens(len(expected.rows), *width)
        here = np.flatnonzero(expected.rows != GONE)
        if not len(here):
            return
        if len(here) < len(expected.rows):
            tokens = tokens[to_device(here, device)]
        rows, drafts = to_device(np.stack((expected.rows[here], expected.num_drafts[here])), device).unbind()
        if k:
            unpack(columns, rows, drafts, tokens, k)
            waiting = np.flatnonzero(expected.holds_states[here])
            if self._states is not None and len(waiting):
                chosen = to_device(waiting, device)
                self._states.accept(rows[chosen], tokens[chosen, 0].long())
        else:  # the step has counted them
            columns.flat_token_ids[rows * columns.width + columns.num_tokens[rows] - 1] = tokens
