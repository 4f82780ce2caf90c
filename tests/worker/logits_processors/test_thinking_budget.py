"""Reasoning ends when its budget is spent, by its whole marker, and nothing else is touched."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from app.records.request import EngineRequest
from app.records.sampling_params import SamplingParams
from app.records.step import NewRequest
from app.records.thinking_budget import ThinkingBudget
from app.worker.logits_processors.base import SamplingStep
from app.worker.logits_processors.thinking_budget import ThinkingBudget as Processor

VOCAB, CPU, OPEN, CLOSE = 13, torch.device("cpu"), 11, 12


def continued(prompts: list[list[int]], budgets: list[ThinkingBudget | None], said: list[list[int]]) -> list[list[int]]:
    """What comes of rows of a model that would say `said`, token by token, side by side."""
    processor = Processor(VOCAB, CPU)
    places = [5, 2, 0, 3][: len(prompts)]
    table = torch.randint(0, 10, (6, 64), dtype=torch.int32)  # what lies beyond a row's tokens is left over
    for place, prompt, budget in zip(places, prompts, budgets, strict=True):
        ids = np.array(prompt, np.int32)
        spec = EngineRequest("r", [], SamplingParams(seed=0), asks=() if budget is None else (budget,))
        request = NewRequest(place, ids, len(prompt), 0, [], spec, ())
        processor.take(place, request)
        table[place, : len(prompt)] = torch.tensor(prompt)
    processor.select(np.array(places))
    outputs: list[list[int]] = [[] for _ in prompts]
    for i in range(len(said[0])):
        logits = torch.full((len(prompts), VOCAB), -1.0)
        for row, words in enumerate(said):
            logits[row, words[i]] = 3.0
        before = logits.clone()
        lengths = np.array([len(prompt) + i for prompt in prompts])
        if processor.active:
            processor.apply(logits, SamplingStep(torch.tensor(places), lengths, torch.from_numpy(lengths), table))
        for row, output in enumerate(outputs):
            token = int(logits[row].argmax())
            assert torch.equal(logits[row], before[row]) or (logits[row] == 0).sum() == 1
            output.append(token)
            table[places[row], len(prompts[row]) + i] = token
    return outputs


@pytest.mark.parametrize("closing", [(CLOSE,), (CLOSE, 9), (CLOSE, CLOSE, 9)], ids=len)
@pytest.mark.parametrize("budget", [0, 1, 3, 7])
def test_reasoning_that_does_not_end_is_ended(budget: int, closing: tuple[int, ...]) -> None:
    talk = [1, 2, 3, 4, 5, 6, 7, 8] * 4
    inside, opened, answers = continued(
        [[4, OPEN], [4, 4, 4], [4]],
        [ThinkingBudget(budget, opening, closing) for opening in ((), (OPEN,), (OPEN,))],
        [talk, [OPEN, *talk[:-1]], talk],
    )
    after = len(closing)
    assert inside == [*talk[:budget], *closing, *talk[budget + after :]]
    assert opened == [OPEN, *talk[:budget], *closing, *talk[budget + after : -1]]
    assert answers == talk, "there was no reasoning"


def test_reasoning_that_ends_by_itself_is_left_alone() -> None:
    early = [1, 2, CLOSE, 9, *([5] * 20)]
    half = [1, 2, 3, CLOSE, 9, *([5] * 19)]  # the marker begins as the budget ends
    space = [0, OPEN, 2, 3, 4, *([5] * 19)]
    found = continued(
        [[OPEN], [OPEN], [4], [4]],
        [
            ThinkingBudget(4, (), (CLOSE, 9)),
            ThinkingBudget(4, (), (CLOSE, 9)),
            ThinkingBudget(4, (OPEN,), (CLOSE, 9)),
            None,
        ],
        [early, half, space, early],
    )
    assert found[0] == early
    assert found[1] == half
    assert found[2][:7] == [0, OPEN, 2, 3, 4, CLOSE, 9], "white space before the reasoning counts with it"
    assert found[3] == early


def test_markers_outside_the_vocabulary_are_harmless() -> None:
    assert continued([[OPEN]], [ThinkingBudget(0, (), (99,))], [[1, 2, 3]]) == [[1, 2, 3]]
