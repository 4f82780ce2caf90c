"""The first stage takes in tokens when a step needs them, and all of them before a call that waits for the device."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from app.records.step import NewRequest, SchedulerOutput
from app.worker.features.token_feedback import TokenFeedback
from app.worker.rows.row_state import RowState

NONE = np.zeros(0, np.int32)


class Link:
    max_unread = 8

    def __init__(self) -> None:
        self.sent = [[7, 8], [9]]

    def receive_tokens(self, *shape: int) -> torch.Tensor:
        return torch.tensor(self.sent.pop(0), dtype=torch.int32).view(shape)


def test_nothing_is_left_unread_between_steps() -> None:
    link: Any = Link()
    state = RowState(3, 16, 4, torch.device("cpu"))
    entering = [
        NewRequest(row, np.array([3, 4], np.int32), 2, 0, [row], None, ())  # type: ignore[arg-type]
        for row in range(2)
    ]
    rows, counts, samples = np.array([0, 1], np.int32), np.array([2, 2], np.int32), np.ones(2, np.bool_)
    message = SchedulerOutput(1, rows, counts, samples, new_requests=entering)
    state.apply(message)
    state.columns.num_tokens[:2] += 1  # as the step's first kernel does
    feedback = TokenFeedback(link, state)
    feedback.expect(np.array([0, 1]), None)
    feedback.expect(np.array([1]), None)
    feedback.before(SchedulerOutput(2, NONE, NONE, NONE.astype(np.bool_), freed_rows=[1]))
    assert len(link.sent) == 2  # no step needs them
    feedback.settle()
    assert not link.sent
    assert state.token_ids[:2, 2].tolist() == [7, 0]  # the second row's request has left
    feedback.settle()
