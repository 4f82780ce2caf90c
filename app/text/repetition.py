"""Finds an output that goes in circles, in work that does not grow with its length."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from app.records.repetition_detection import RepetitionDetection

REPETITION = "repetition_detected"  # the stop reason, as vLLM calls it


class RepetitionFinder:
    """Follows one output. A pattern of p tokens stands there c times when p * (c - 1) tokens in a row equal the token
    p places before them, so a counter for each size is all there is to keep."""

    def __init__(self, params: RepetitionDetection, min_tokens: int) -> None:
        self._sizes = np.arange(max(1, params.min_pattern_size), params.max_pattern_size + 1)
        self._needed = self._sizes * (params.min_count - 1)
        self._runs = np.zeros_like(self._sizes)  # equal tokens in a row, for each size
        self._latest = np.full(params.max_pattern_size, -1)  # the newest first
        self._num_early = min_tokens

    def find(self, token_ids: Sequence[int]) -> int:
        """Take more tokens; how many of them it took to complete a repetition, 0 when there is none."""
        for i, token_id in enumerate(token_ids):
            self._runs = (self._runs + 1) * (self._latest[self._sizes - 1] == token_id)
            self._latest[1:] = self._latest[:-1]
            self._latest[0] = token_id
            self._num_early -= 1
            if self._num_early <= 0 and (self._runs >= self._needed).any():
                return i + 1
        return 0
