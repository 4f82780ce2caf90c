"""Token types of encoders: 0 in the first text of a pair, 1 in the second."""

from __future__ import annotations

import numpy as np
import torch

from app.engine.row_feature import RowFeature
from app.engine.step import NewRequest
from app.engine.to_device import to_device
from app.engine.worker.features.context import FeatureContext
from app.engine.worker.input_batch import InputBatch

LONGEST = np.iinfo(np.int64).max


class TokenTypes(RowFeature):
    """Keeps where each row's second text begins."""

    def __init__(self, max_num_seqs: int, device: torch.device) -> None:
        self._device = device
        self._second_text_at = np.full(max_num_seqs, LONGEST)

    def enter(self, row: int, request: NewRequest) -> None:
        """A request entered its row."""
        params = request.spec.pooling
        at = None if params is None else params.second_text_at
        self._second_text_at[row] = LONGEST if at is None else at

    def inputs(self, batch: InputBatch) -> None:
        """`token_types` int64 [T]."""
        counts = np.diff(batch.query_start_loc)
        positions = np.arange(batch.query_start_loc[-1]) - np.repeat(
            batch.query_start_loc[:-1] - batch.first_positions, counts
        )
        second = np.repeat(self._second_text_at[batch.rows], counts)
        batch.layer_inputs["token_types"] = to_device((positions >= second).astype(np.int64), self._device)


def create(context: FeatureContext) -> TokenTypes | None:
    """The feature, where the model tells the texts of a pair apart."""
    if context.pooling is None or not context.pooling.has_token_types:
        return None
    return TokenTypes(len(context.state.num_tokens), context.state.device)
