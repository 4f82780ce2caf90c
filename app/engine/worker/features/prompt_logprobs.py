"""`prompt_logprobs`: what the model thought of each prompt token, chunk by chunk as the prompt is computed."""

from __future__ import annotations

from collections.abc import Callable

import torch

from app.engine.sampling.logprobs import RawLogprobs, num_logprobs
from app.engine.step import NewRequest
from app.engine.worker.input_batch import InputBatch
from app.engine.worker.pending_step import PromptPiece
from app.engine.worker.row_state import RowState

PIECE = 256  # positions whose logits exist at the same time: [PIECE, V] fp32


class PromptLogprobs:
    """Remembers the rows that ask; a step without them costs one look at an empty table."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._counts: dict[int, int] = {}  # row -> likeliest tokens a position

    def add(self, request: NewRequest) -> None:
        """A request entered its row."""
        self._counts.pop(request.row, None)
        count = num_logprobs(request.sampling_params.prompt_logprobs, self._vocab_size)
        if count is not None:
            self._counts[request.row] = count

    def remove(self, row: int) -> None:
        """The row was freed."""
        self._counts.pop(row, None)

    def compute(
        self,
        rows: list[int],
        batch: InputBatch,
        state: RowState,
        hidden: torch.Tensor,
        logits: Callable[[torch.Tensor], torch.Tensor],
    ) -> list[PromptPiece]:
        """Pieces for the step's hidden states [T, C]. The token at position p describes the prompt token at p + 1."""
        pieces: list[PromptPiece] = []
        for index, row in enumerate(rows):
            if row not in self._counts:
                continue
            first, start = int(batch.first_positions[index]), int(batch.query_start_loc[index])
            computed = int(batch.query_start_loc[index + 1]) - start
            described = min(computed, int(state.num_prompt_tokens[row]) - 1 - first)
            for offset in range(0, described, PIECE):
                size = min(PIECE, described - offset)
                position = first + offset + 1
                targets = state.token_ids[row, position : position + size].long()
                raw = RawLogprobs.of(logits(hidden[start + offset : start + offset + size]), self._counts[row])
                pieces.append(PromptPiece(index, position, self._counts[row], raw.of_chosen(targets)))
        return pieces

    def __bool__(self) -> bool:
        """Whether any row asks."""
        return bool(self._counts)
