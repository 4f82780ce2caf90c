"""`logit_bias`: a number added to the logits of some tokens."""

from __future__ import annotations

import torch

from app.engine.logits_processors.base import LogitsProcessor, SamplingStep
from app.engine.step import NewRequest


class LogitBias(LogitsProcessor):
    """Scatters all rows' biases at once."""

    def read(self, request: NewRequest) -> dict[int, float] | None:
        """Token id -> bias."""
        bias = request.sampling_params.logit_bias or {}
        return {token: value for token, value in bias.items() if self.in_vocabulary(token)} or None

    def build(self, indices: list[int], states: list[dict[int, float]]) -> None:
        """Flat (row, token, bias)."""
        self._rows = self.long([i for i, bias in zip(indices, states, strict=True) for _ in bias])
        self._tokens = self.long([token for bias in states for token in bias])
        self._values = self.floats([value for bias in states for value in bias.values()])

    def apply(self, logits: torch.Tensor, step: SamplingStep) -> None:
        """Logits + bias."""
        logits.index_put_((self._rows, self._tokens), self._values, accumulate=True)
