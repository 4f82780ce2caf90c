"""`prompt_logprobs`: the log probability of each prompt token, chunk by chunk as the prompt is computed."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from app.kernels.sampling import LOG_SOFTMAX
from app.layers.context import HiddenStates
from app.records.step import NewRequest, SchedulerOutput
from app.worker.features.context import FeatureContext
from app.worker.forward_pass import ForwardPass
from app.worker.rows.logprobs import RawLogprobs, num_logprobs
from app.worker.rows.pending_step import PromptPiece, StepResults
from app.worker.rows.row_state import RowState
from app.worker.rows.step_inputs import HostRows, StepView
from app.worker.rows.worker_feature import WorkerFeature

PIECE = 256  # positions whose logits exist at the same time: [PIECE, V] fp32


class PromptLogprobs(WorkerFeature):
    """Remembers the rows that ask; a step without them costs one look at an empty table."""

    def __init__(self, forward: ForwardPass, state: RowState, *, exact: bool = False) -> None:
        """`exact`: see `Sampler`."""
        self._forward = forward
        self._log_softmax = LOG_SOFTMAX.on(state.device, exact=exact)
        self._state = state
        self._counts: dict[int, int] = {}  # row -> most likely tokens a position
        self._found: list[PromptPiece] = []  # of the step that is being computed

    def enter(self, row: int, request: NewRequest) -> None:
        """A request entered its row."""
        self._counts.pop(row, None)
        wanted = request.spec.sampling.prompt_logprobs
        if wanted is not None and (count := num_logprobs(wanted, self._forward.vocab_size)) is not None:
            self._counts[row] = count

    def leave(self, row: int) -> None:
        """The row was freed."""
        self._counts.pop(row, None)

    def reads_all(self, rows: NDArray[np.int64]) -> bool:
        """True if one of the rows asks."""
        return bool(self._counts) and any(row in self._counts for row in rows.tolist())

    def hidden(self, view: StepView, hidden: HiddenStates) -> None:
        """Pieces for the step's hidden states. The token at position p describes the prompt token at p + 1."""
        if not self._counts or view.host is None:  # a step over static tensors has no prompts
            return
        for index, row in enumerate(view.host.rows.tolist()):
            if row in self._counts:
                self._found += self._pieces(index, row, view.host, hidden.last)

    def after(self, step: SchedulerOutput, results: StepResults) -> None:
        """Hand over what the step's prompts gave."""
        if self._found:
            results.prompt_pieces, self._found = self._found, []

    def _pieces(self, index: int, row: int, host: HostRows, hidden: torch.Tensor) -> list[PromptPiece]:
        pieces, count = [], self._counts[row]
        first, start = int(host.first_positions[index]), int(host.starts[index])
        computed = int(host.starts[index + 1]) - start
        described = min(computed, int(self._state.num_prompt_tokens[row]) - 1 - first)
        for offset in range(0, described, PIECE):
            size = min(PIECE, described - offset)
            position = first + offset + 1
            targets = self._state.token_ids[row, position : position + size].long()
            chosen = slice(start + offset, start + offset + size)
            logits = self._forward.logits(hidden[chosen], chosen)
            raw = RawLogprobs.of(self._log_softmax(logits), count)
            pieces.append(PromptPiece(index, position, count, raw.of_chosen(targets)))
        return pieces


def create(context: FeatureContext) -> PromptLogprobs | None:
    """The feature, on the stage where logits are computed."""
    if context.pooling is not None or not context.forward.link.is_last:
        return None
    return PromptLogprobs(context.forward, context.state, exact=context.config.is_exact)
