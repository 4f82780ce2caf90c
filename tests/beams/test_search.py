"""Beam search by itself, over a table of probabilities; enumerating all continuations judges.

That its tokens are transformers' is tested where an engine runs it (tests/offline, tests/api/chat).
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from app.beams.search import BeamSearch, BeamSearchParams
from app.records.request import EngineRequest, Placement
from app.records.sampling_params import SamplingParams
from app.records.step import TokenLogprobs

VOCABULARY, END, LENGTH = 5, 4, 3


def table(seed: int) -> np.ndarray:
    """Log-probabilities of the next token after each token: [V, V]."""
    logits = np.random.default_rng(seed).normal(scale=2.0, size=(VOCABULARY, VOCABULARY))
    return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))


def answer(row: np.ndarray, num_shown: int) -> TokenLogprobs:
    """As an engine answers: the chosen token, then the most likely ones."""
    order = np.argsort(-row)
    shown = [int(order[0]), *map(int, order[:num_shown])]
    return TokenLogprobs(shown, [float(row[token]) for token in shown], list(range(1, len(shown) + 1)))


def asked(prompt: list[int]) -> EngineRequest:
    """The request for the whole search."""
    return EngineRequest("beams", prompt, SamplingParams(seed=0, max_tokens=LENGTH), placement=Placement(priority=3))


def every_ending(rows: np.ndarray, penalty: float) -> dict[tuple[int, ...], float]:
    """Score of each continuation that ends, or is as long as it may be."""
    found = {}
    for length in range(1, LENGTH + 1):
        for tokens in itertools.product(range(VOCABULARY), repeat=length):
            ends_early = END in tokens[:-1]
            if ends_early or (tokens[-1] != END and length < LENGTH):
                continue
            total = sum(rows[before, token] for before, token in zip((0, *tokens), tokens, strict=False))
            found[tokens] = float(total) / length**penalty
    return found


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("penalty", [0.0, 1.0, 2.0])
def test_a_search_as_wide_as_the_tree_finds_the_best(seed: int, penalty: float) -> None:
    rows = table(seed)
    width = VOCABULARY**LENGTH
    params = BeamSearchParams(beam_width=width, length_penalty=penalty, early_stopping="never")
    search = BeamSearch([0], params, frozenset((END,)), LENGTH, VOCABULARY)
    while asks := search.requests(asked([0]), 0):
        search.advance([answer(rows[ask.prompt_token_ids[-1]], VOCABULARY) for ask in asks])
    judged = every_ending(rows, penalty)
    assert {tuple(beam.token_ids): pytest.approx(beam.score) for beam in search.finished} == judged
    assert tuple(search.finished[0].token_ids) == max(judged, key=judged.__getitem__)


def test_what_the_engine_is_asked_for() -> None:
    search = BeamSearch([7, 8], BeamSearchParams(beam_width=2), frozenset((END,)), 4, VOCABULARY)
    (first,) = search.requests(asked([7, 8]), 0)
    assert (first.sampling.max_tokens, first.sampling.logprobs, first.prompt_token_ids) == (1, VOCABULARY, [7, 8])
    assert first.placement == asked([7, 8]).placement
    search.advance([answer(table(0)[0], VOCABULARY)])
    asks = search.requests(asked([7, 8]), 1)
    assert [ask.prompt_token_ids[:2] for ask in asks] == [[7, 8]] * len(search.running)
    assert len({first.request_id, *(ask.request_id for ask in asks)}) == 1 + len(asks)
