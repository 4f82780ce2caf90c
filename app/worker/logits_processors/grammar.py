"""Structured outputs: the tokens that the host's grammar forbids become impossible."""

from __future__ import annotations

from typing import Any

import torch

from app.kernels.sampling import TOKEN_MASKS
from app.platforms.to_device import to_device
from app.records.step import NewRequest, SchedulerOutput, TokenMasks
from app.worker.logits_processors.base import LogitsProcessor, SamplingStep


class Grammar(LogitsProcessor):
    """Applies the masks that came with the step message; without any, the rows are still thinking."""

    reads = frozenset({"has_grammar"})

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        super().__init__(vocab_size, device)
        self._apply_masks = TOKEN_MASKS.on(device)
        self._masks: TokenMasks | None = None

    def read(self, request: NewRequest) -> bool | None:
        """Tells whether step messages may carry masks for the row."""
        return True if request.has_grammar else None

    def before(self, step: SchedulerOutput) -> None:
        """Keep the masks that came with the step."""
        self._masks = step.masks

    def build(self, indices: list[int], states: list[Any]) -> None:
        """Nothing to read here: masks come with the step messages."""

    def apply(self, logits: torch.Tensor, step: SamplingStep) -> None:
        """-inf where a bit is 0. The one transfer is from pinned memory, so nobody waits for it."""
        masks = self._masks
        if masks is not None:
            self._apply_masks(logits, to_device(masks.indices, self.device), to_device(masks.words, self.device))
