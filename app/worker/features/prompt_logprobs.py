"""`prompt_logprobs`: the log probability of each prompt token, chunk by chunk as the prompt is computed."""

from __future__ import annotations

import torch

from app.engine.row_feature import RowFeature
from app.engine.sampling.logprobs import RawLogprobs, num_logprobs
from app.engine.step import NewRequest
from app.engine.worker.features.context import FeatureContext
from app.engine.worker.forward_pass import ForwardPass
from app.engine.worker.input_batch import InputBatch
from app.engine.worker.pending_step import PromptPiece, StepResults
from app.engine.worker.row_state import RowState

PIECE = 256  # positions whose logits exist at the same time: [PIECE, V] fp32


class PromptLogprobs(RowFeature):
    """Remembers the rows that ask; a step without them costs one look at an empty table."""

    def __init__(self, forward: ForwardPass, state: RowState) -> None:
        self._forward = forward
        self._state = state
        self._counts: dict[int, int] = {}  # row -> most likely tokens a position

    def enter(self, row: int, request: NewRequest) -> None:
        """A request entered its row."""
        self._counts.pop(row, None)
        count = num_logprobs(request.spec.sampling.prompt_logprobs, self._forward.vocab_size)
        if count is not None:
            self._counts[row] = count

    def leave(self, row: int) -> None:
        """The row was freed."""
        self._counts.pop(row, None)

    def after(self, batch: InputBatch, hidden: torch.Tensor, results: StepResults) -> None:
        """Pieces for the step's hidden states [T, C]. The token at position p describes the prompt token at p + 1."""
        if not self._counts:
            return
        for index, row in enumerate(batch.rows.tolist()):
            if row in self._counts:
                results.prompt_pieces += self._pieces(index, row, batch, hidden)

    def _pieces(self, index: int, row: int, batch: InputBatch, hidden: torch.Tensor) -> list[PromptPiece]:
        pieces, count = [], self._counts[row]
        first, start = int(batch.first_positions[index]), int(batch.query_start_loc[index])
        computed = int(batch.query_start_loc[index + 1]) - start
        described = min(computed, int(self._state.num_prompt_tokens[row]) - 1 - first)
        for offset in range(0, described, PIECE):
            size = min(PIECE, described - offset)
            position = first + offset + 1
            targets = self._state.token_ids[row, position : position + size].long()
            logits = self._forward.logits(hidden[start + offset : start + offset + size])
            raw = RawLogprobs.of(logits, count)
            pieces.append(PromptPiece(index, position, count, raw.of_chosen(targets)))
        return pieces


def create(context: FeatureContext) -> PromptLogprobs | None:
    """The feature, on the stage where logits are computed."""
    if context.pooling is not None or not context.forward.link.is_last:
        return None
    return PromptLogprobs(context.forward, context.state)
