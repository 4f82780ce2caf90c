"""The masks of several matchers at once, side by side on the machine's cores."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence

import numpy as np
from llguidance import LLExecutor
from numpy.typing import NDArray

from app.engine.structured.matcher import Matcher

MIN_PARALLEL = 4  # fewer are done sooner than threads are woken for them
MAX_THREADS = 8


def fill_masks(matchers: Sequence[Matcher]) -> NDArray[np.int32]:
    """int32 [G, ceil(V / 32)]; see TokenMasks. All matchers are active and of one vocabulary.

    A matcher that fails here allows everything: its next `accept` says what happened.
    """
    words = np.zeros((len(matchers), matchers[0].num_words), np.int32)
    executor = _executor() if len(matchers) >= MIN_PARALLEL else None
    if executor is None:
        for matcher, row in zip(matchers, words, strict=True):
            matcher.fill_mask(row)
    else:
        pairs = [(matcher.grammar, i) for i, matcher in enumerate(matchers)]
        executor.unsafe_compute_mask_ptr(pairs, words.ctypes.data, words.shape[1] * 4, len(words))
    words[~words.any(axis=1)] = -1
    for matcher, row in zip(matchers, words, strict=True):
        matcher.allow_reasoning(row)
    return words


@functools.cache
def _executor() -> LLExecutor | None:
    """Threads for this process; None where there is nothing to share out."""
    threads = min(MAX_THREADS, (os.cpu_count() or 1) // 2)
    return LLExecutor(num_threads=threads) if threads > 1 else None
