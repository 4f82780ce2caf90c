"""`allowed_token_ids`: every other token becomes impossible."""

from __future__ import annotations

import math

import torch

from app.engine.logits_processors.base import LogitsProcessor, SamplingStep
from app.engine.step import NewRequest


class AllowedTokenIds(LogitsProcessor):
    """Adds a mask of 0 and -inf, built when the rows change."""

    def read(self, request: NewRequest) -> list[int] | None:
        """The allowed ids."""
        allowed = request.sampling_params.allowed_token_ids
        return None if allowed is None else [token for token in allowed if self.in_vocabulary(token)]

    def build(self, indices: list[int], states: list[list[int]]) -> None:
        """One mask row for each user."""
        self._indices = self.long(indices)
        rows = self.long([i for i, allowed in enumerate(states) for _ in allowed])
        tokens = self.long([token for allowed in states for token in allowed])
        self._mask = torch.full((len(indices), self.vocab_size), -math.inf, device=self.device)
        self._mask.index_put_((rows, tokens), torch.zeros((), device=self.device))

    def apply(self, logits: torch.Tensor, step: SamplingStep) -> None:
        """Logits + mask."""
        logits.index_add_(0, self._indices, self._mask)
