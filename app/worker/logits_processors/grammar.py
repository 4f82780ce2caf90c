"""Structured outputs: the tokens that the host's grammar forbids become impossible."""

from __future__ import annotations

from typing import Any

import torch

from app.engine.logits_processors.base import LogitsProcessor, SamplingStep
from app.engine.step import NewRequest, SchedulerOutput, TokenMasks
from app.engine.to_device import to_device
from app.kernels.sampling import apply_token_masks


class Grammar(LogitsProcessor):
    """Applies the masks that came with the step message; without any, the rows are still thinking."""

    _masks: TokenMasks | None = None

    def read(self, request: NewRequest) -> bool | None:
        """Whether step messages may carry masks for the row."""
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
            apply_token_masks(logits, to_device(masks.indices, self.device), to_device(masks.words, self.device))
