"""The masks of several matchers at once, side by side on the machine's cores: for the next token, and after drafts."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from llguidance import LLExecutor, LLMatcher
from numpy.typing import NDArray

from app.structured.matcher import Matcher

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


@dataclass(slots=True, frozen=True)
class DraftMasks:
    """Says which draft tokens a row may compute, and the masks for the token after each of them, and before all."""

    num_drafts: int
    words: NDArray[np.int32] | None  # [1 + num_drafts, ceil(V / 32)]; None: nothing is constrained yet


def mask_drafts(proposed: Sequence[tuple[Matcher, list[int]]]) -> list[DraftMasks | None]:
    """Cuts draft tokens where their grammars do, and makes the masks of all places in one pass; None where that is too
    much work. The matcher itself is to find that out when it comes to it: rejected tokens may not end a request."""
    counts = [matcher.num_possible(drafts) for matcher, drafts in proposed]
    found: list[DraftMasks | None] = [DraftMasks(count, None) for count in counts]
    active = [i for i, (matcher, _) in enumerate(proposed) if matcher.is_active]
    if not active:
        return found
    firsts = np.cumsum([0, *(counts[i] + 1 for i in active)]).tolist()
    words = np.zeros((firsts[-1], proposed[active[0]][0].num_words), np.int32)
    probes = [
        (proposed[i][0].grammar.deep_copy(), first, proposed[i][1][: counts[i]])
        for i, first in zip(active, firsts, strict=False)
    ]
    _fill(probes, words)
    words[~words.any(axis=1)] = -1
    for i, (probe, first, drafts) in zip(active, probes, strict=True):
        proposed[i][0].allow_reasoning(words[first])
        found[i] = None if probe.is_error() else DraftMasks(len(drafts), words[first : first + len(drafts) + 1])
    return found


def _fill(probes: Sequence[tuple[LLMatcher, int, list[int]]], words: NDArray[np.int32]) -> None:
    """Computes the mask of each matcher's next token at the row that is named, and below it those after its drafts."""
    executor = _executor() if len(probes) >= MIN_PARALLEL else None
    if executor is None:
        for probe, first, drafts in probes:
            for place, draft in enumerate([*drafts, None], first):
                probe.unsafe_compute_mask_ptr(words[place].ctypes.data, words[place].nbytes)
                if draft is not None:
                    probe.consume_token(draft)
        return
    shape = words.ctypes.data, words.shape[1] * 4, len(words)
    if ahead := [entry for entry in probes if entry[2]]:
        executor.unsafe_compute_mask_ptr_with_draft_token(ahead, *shape)
    if alone := [(probe, first) for probe, first, drafts in probes if not drafts]:
        executor.unsafe_compute_mask_ptr(alone, *shape)


@functools.cache
def _executor() -> LLExecutor | None:
    """Threads for this process; None where there is nothing to share out."""
    threads = min(MAX_THREADS, (os.cpu_count() or 1) // 2)
    return LLExecutor(num_threads=threads) if threads > 1 else None
