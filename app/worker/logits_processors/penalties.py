"""Presence, frequency and repetition penalties.

Presence and frequency (OpenAI's formula) look at the output, repetition (CTRL: Keskar et al., 2019) at prompt and
output; both are counted from the device's token history (I2), so a token counts as soon as it was sampled.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from app.records.step import NewRequest
from app.worker.logits_processors.base import LogitsProcessor, SamplingStep


@dataclass(slots=True, frozen=True)
class _State:
    num_prompt_tokens: int
    presence: float
    frequency: float
    repetition: float


class Penalties(LogitsProcessor):
    """Works on the rows that use a penalty only."""

    reads = frozenset({"presence_penalty", "frequency_penalty", "repetition_penalty"})

    def read(self, request: NewRequest) -> _State | None:
        """The three penalties; None when all are neutral."""
        p = request.spec.sampling
        if p.presence_penalty == 0.0 and p.frequency_penalty == 0.0 and p.repetition_penalty == 1.0:
            return None
        return _State(request.num_prompt_tokens, p.presence_penalty, p.frequency_penalty, p.repetition_penalty)

    def build(self, indices: list[int], states: list[_State]) -> None:
        """Make a column [n, 1] of each penalty."""
        self._users = indices
        self._indices = self.long(indices)
        self._num_prompt = self.long([state.num_prompt_tokens for state in states]).unsqueeze(1)
        self._presence = self.floats([state.presence for state in states]).unsqueeze(1)
        self._frequency = self.floats([state.frequency for state in states]).unsqueeze(1)
        self._repetition = self.floats([state.repetition for state in states]).unsqueeze(1)
        self._any_repetition = any(state.repetition != 1.0 for state in states)
        self._any_output = any(state.presence != 0.0 or state.frequency != 0.0 for state in states)

    def apply(self, logits: torch.Tensor, step: SamplingStep) -> None:
        """Repetition first, then frequency and presence."""
        longest = int(step.lengths[self._users].max())
        history = step.token_ids[step.rows[self._indices], :longest].long()  # [n, longest]
        columns = torch.arange(longest, device=self.device)
        known = columns < step.device_lengths[self._indices].unsqueeze(1)
        chosen = logits[self._indices]
        if self._any_repetition:
            seen = self._counts(history, known) > 0
            scaled = torch.where(chosen > 0, chosen / self._repetition, chosen * self._repetition)
            chosen = torch.where(seen, scaled, chosen)
        if self._any_output:
            counts = self._counts(history, known & (columns >= self._num_prompt))
            chosen = chosen - self._frequency * counts - self._presence * (counts > 0)
        logits[self._indices] = chosen

    def _counts(self, history: torch.Tensor, counted: torch.Tensor) -> torch.Tensor:
        """fp32 [n, V]: how often each token stands where `counted` is True."""
        counts = torch.zeros(history.shape[0], self.vocab_size, device=self.device)
        return counts.scatter_add_(1, history, counted.float())
