"""`bad_words`: the last token of a forbidden word is impossible right after the rest of it.

The output so far is read from the device's token history (I2). Words are kept one behind the other, not as a table of
the longest one's width, so a step costs as many comparisons as the words have tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from app.records.bad_words import BadWords as BadWordsAsked
from app.records.step import NewRequest
from app.worker.logits_processors.base import LogitsProcessor, SamplingStep


@dataclass(slots=True, frozen=True)
class _State:
    """A request's W words, whose prefixes (all tokens but the last) have P tokens together."""

    num_prompt_tokens: int
    last: NDArray[np.int64]  # [W]
    prefixes: NDArray[np.int64]  # [P], one word's behind the other's
    word: NDArray[np.int64]  # [P], which word each token is of
    offset: NDArray[np.int64]  # [P], where it stands, counted back from the end of the output: -1 is the last token


class BadWords(LogitsProcessor):
    """Compares the tail of the output with all words of all rows at once."""

    reads = frozenset({BadWordsAsked})

    def read(self, request: NewRequest) -> _State | None:
        """The words, as token ids."""
        asked = request.spec.asked(BadWordsAsked)
        told = () if asked is None else asked.token_ids
        words = [word for word in told if word and all(map(self.in_vocabulary, word))]
        if not words:
            return None
        lengths = np.array([len(word) - 1 for word in words], np.int64)
        places = np.arange(lengths.sum()) - np.repeat(lengths.cumsum() - lengths, lengths)
        return _State(
            request.num_prompt_tokens,
            last=np.array([word[-1] for word in words], np.int64),
            prefixes=np.array([token for word in words for token in word[:-1]], np.int64),
            word=np.repeat(np.arange(len(words)), lengths),
            offset=places - np.repeat(lengths, lengths),
        )

    def build(self, indices: list[int], states: list[_State]) -> None:
        """All rows' words, flat; `_word` counts through all of them."""
        self._rows, last = self.flat(indices, [state.last for state in states])
        self._last = self.long(last)
        self._prefix_rows, prefixes = self.flat(indices, [state.prefixes for state in states])
        self._prefixes = self.long(prefixes)
        counts = np.array([len(state.last) for state in states])
        firsts = counts.cumsum() - counts
        self._word = self.long(np.concatenate([s.word + first for s, first in zip(states, firsts, strict=True)]))
        self._offsets = self.long(np.concatenate([state.offset for state in states]))
        num_prompt = [state.num_prompt_tokens for state in states]
        self._num_prompt = self.long(np.repeat(num_prompt, [len(state.prefixes) for state in states]))

    def apply(self, logits: torch.Tensor, step: SamplingStep) -> None:
        """-inf for the last token of each word whose prefix ends the output."""
        columns = step.device_lengths[self._prefix_rows] + self._offsets
        tail = step.token_ids[step.rows[self._prefix_rows], columns.clamp(min=0)]
        differs = (tail != self._prefixes) | (columns < self._num_prompt)
        differences = torch.zeros(self._rows.shape, device=self.device).index_add_(0, self._word, differs.float())
        penalty = torch.zeros(self._rows.shape, device=self.device).masked_fill_(differences == 0, -math.inf)
        logits.index_put_((self._rows, self._last), penalty, accumulate=True)
