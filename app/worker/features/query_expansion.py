"""The tokens behind a query that lengthen it (ColBERT): they see the query, and no token sees them."""

from __future__ import annotations

import numpy as np
import torch

from app.records.late_interaction import ExpandedQuery
from app.records.step import NewRequest
from app.worker.features.context import FeatureContext
from app.worker.rows.step_inputs import StepInputs, StepView
from app.worker.rows.worker_feature import WorkerFeature

ALL = np.iinfo(np.int64).max


class QueryExpansion(WorkerFeature):
    """Keeps how many tokens of each row are seen."""

    def __init__(self, inputs: StepInputs) -> None:
        self._num_seen = inputs.declare("num_seen", torch.int64, idle=ALL)

    def enter(self, row: int, request: NewRequest) -> None:
        """A request entered its row."""
        ask = request.spec.asked(ExpandedQuery)
        self._num_seen.set(row, ALL if ask is None else ask.num_seen)

    def inputs(self, view: StepView) -> None:
        """`seen` bool [T], in steps that bring such a query."""
        assert view.host is not None, "an encoder's step is not over static tensors"
        if (self._num_seen.values[view.host.rows] != ALL).any():
            view.layer_inputs["seen"] = view.tensors.positions < view.of_tokens("num_seen")


def create(context: FeatureContext) -> QueryExpansion | None:
    """The feature, where the model lengthens queries by tokens that are not seen."""
    late = None if context.pooling is None else context.pooling.late
    if late is None or late.expansion is None or late.expansion.is_seen:
        return None
    return QueryExpansion(context.state.inputs)
