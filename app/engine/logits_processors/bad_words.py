"""`bad_words`: the last token of a forbidden word is impossible right after the rest of it.

The output so far is read from the device's token history (I2).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from app.engine.logits_processors.base import LogitsProcessor, SamplingStep
from app.engine.step import NewRequest

ANY = -1  # in a prefix: matches whatever stands there


@dataclass(slots=True, frozen=True)
class _State:
    num_prompt_tokens: int
    words: list[tuple[int, ...]]


class BadWords(LogitsProcessor):
    """Compares the tail of the output with all words of all rows at once."""

    def read(self, request: NewRequest) -> _State | None:
        """The words, as token ids."""
        words = [word for word in request.bad_words_token_ids if word and all(map(self.in_vocabulary, word))]
        return _State(request.num_prompt_tokens, words) if words else None

    def build(self, indices: list[int], states: list[_State]) -> None:
        """Words flat, their prefixes right-aligned in [W, longest prefix]."""
        flat = [(i, s.num_prompt_tokens, word) for i, s in zip(indices, states, strict=True) for word in s.words]
        self._width = max(len(word) for _, _, word in flat) - 1
        self._rows = self.long([i for i, _, _ in flat])
        self._num_prompt = self.long([num_prompt for _, num_prompt, _ in flat]).unsqueeze(1)
        self._last = self.long([word[-1] for _, _, word in flat])
        prefixes = [[ANY] * (self._width + 1 - len(word)) + list(word[:-1]) for _, _, word in flat]
        self._prefix = self.long([token for prefix in prefixes for token in prefix]).view(len(flat), self._width)
        self._offsets = torch.arange(-self._width, 0, device=self.device)

    def apply(self, logits: torch.Tensor, step: SamplingStep) -> None:
        """-inf for the last token of each word whose prefix ends the output."""
        columns = step.device_lengths[self._rows].unsqueeze(1) + self._offsets  # [W, longest prefix]
        tail = step.token_ids[step.rows[self._rows].unsqueeze(1), columns.clamp(min=0)]
        same = (tail == self._prefix) & (columns >= self._num_prompt)
        hit = (same | (self._prefix == ANY)).all(dim=1)
        penalty = torch.zeros(hit.shape, device=self.device).masked_fill_(hit, -math.inf)
        logits.index_put_((self._rows, self._last), penalty, accumulate=True)
