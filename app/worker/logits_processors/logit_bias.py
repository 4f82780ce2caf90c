"""`logit_bias`: a number added to the logits of some tokens."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from app.platforms.to_device import to_device
from app.records.step import Float32Array, NewRequest
from app.worker.logits_processors.base import LogitsProcessor, SamplingStep


class LogitBias(LogitsProcessor):
    """Scatters all rows' biases at once."""

    reads = frozenset({"logit_bias"})

    def read(self, request: NewRequest) -> tuple[NDArray[np.int64], Float32Array] | None:
        """Token ids and their biases, [n] each."""
        bias = request.spec.sampling.logit_bias or {}
        known = {token: value for token, value in bias.items() if self.in_vocabulary(token)}
        return (np.array(list(known), np.int64), np.array(list(known.values()), np.float32)) if known else None

    def build(self, indices: list[int], states: list[tuple[NDArray[np.int64], Float32Array]]) -> None:
        """Flat (row, token, bias)."""
        self._rows, tokens = self.flat(indices, [tokens for tokens, _ in states])
        self._tokens = self.long(tokens)
        self._values = to_device(np.concatenate([values for _, values in states]), self.device)

    def apply(self, logits: torch.Tensor, step: SamplingStep) -> None:
        """Logits + bias."""
        logits.index_put_((self._rows, self._tokens), self._values, accumulate=True)
