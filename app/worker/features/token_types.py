"""Token types of encoders: 0 in the first text of a pair, 1 in the second."""

from __future__ import annotations

import numpy as np
import torch

from app.records.step import NewRequest
from app.worker.features.context import FeatureContext
from app.worker.rows.step_inputs import StepInputs, StepView
from app.worker.rows.worker_feature import WorkerFeature

LONGEST = np.iinfo(np.int64).max


class TokenTypes(WorkerFeature):
    """Keeps where each row's second text begins."""

    def __init__(self, inputs: StepInputs) -> None:
        self._second_text_at = inputs.declare("second_text_at", torch.int64, idle=LONGEST)

    def enter(self, row: int, request: NewRequest) -> None:
        """A request entered its row."""
        params = request.spec.pooling
        at = None if params is None else params.second_text_at
        self._second_text_at.set(row, LONGEST if at is None else at)

    def inputs(self, view: StepView) -> None:
        """`token_types` int64 [T], in steps that bring a second text."""
        if view.host is not None and (self._second_text_at.values[view.host.rows] == LONGEST).all():
            return
        second = view.tensors.positions >= view.of_tokens("second_text_at")
        view.layer_inputs["token_types"] = second.long()


def create(context: FeatureContext) -> TokenTypes | None:
    """The feature, where the model tells the texts of a pair apart."""
    if context.pooling is None or not context.pooling.has_token_types:
        return None
    return TokenTypes(context.state.inputs)
