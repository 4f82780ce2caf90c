"""The counters find what comparing slices finds."""

from __future__ import annotations

import random

import pytest

from app.records.repetition_detection import RepetitionDetection
from app.text.repetition import RepetitionFinder


def by_slices(tokens: list[int], smallest: int, largest: int, count: int) -> bool:
    """Whether the end of `tokens` is one pattern, `count` times over."""
    for size in range(smallest, largest + 1):
        tail = tokens[-size * count :]
        if len(tail) == size * count and tail == tail[:size] * count:
            return True
    return False


@pytest.mark.parametrize("seed", range(40))
def test_against_slices(seed: int) -> None:
    rng = random.Random(seed)
    largest, count = rng.randint(1, 6), rng.randint(2, 4)
    smallest, least = rng.randint(1, largest), rng.choice([0, 0, 20])
    tokens: list[int] = []
    while len(tokens) < 200:
        piece = [rng.randint(0, 2) for _ in range(rng.randint(1, 7))]
        tokens += piece * rng.choice([1, 1, 1, 2, 3, 4])
    params = RepetitionDetection(max_pattern_size=largest, min_pattern_size=smallest, min_count=count)
    finder = RepetitionFinder(params, least)
    expected = next(
        (n for n in range(max(1, least), len(tokens) + 1) if by_slices(tokens[:n], smallest, largest, count)), 0
    )
    found = at = 0
    while at < len(tokens) and not found:
        size = rng.randint(1, 5)
        taken = finder.find(tokens[at : at + size])
        found, at = at + taken if taken else 0, at + size
    assert found == expected
