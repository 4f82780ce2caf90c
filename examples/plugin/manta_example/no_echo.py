"""No token twice in a row."""

from __future__ import annotations

import math

import torch

from app.records.step import NewRequest
from app.worker.logits_processors.base import LogitsProcessor, SamplingStep


class NoEcho(LogitsProcessor):
    """Forbids the token before. It reads the device's token history, so it never waits for the host."""

    def read(self, request: NewRequest) -> bool | None:
        """Every request uses it; None would leave one out."""
        return True

    def build(self, indices: list[int], states: list[bool]) -> None:
        """`indices` are the logits rows of its requests, int64 [n]."""
        self._indices = self.long(indices)

    def apply(self, logits: torch.Tensor, step: SamplingStep) -> None:
        """See LogitsProcessor."""
        rows, last = step.rows[self._indices], step.device_lengths[self._indices] - 1
        logits[self._indices, step.token_ids[rows, last].long()] = -math.inf
