"""What steps take by their tokens, found from times with noise."""

from __future__ import annotations

import random

import pytest

from app.engine.scheduler.token_costs import FIT_AFTER, TokenCosts

LINE = (2.7e-3, 0.13e-3, 0.5e-3, 0.02e-3)


def takes(rows: int, tokens: int, proposed: int) -> float:
    return LINE[0] + LINE[1] * tokens + proposed * (LINE[2] + LINE[3] * rows)


def test_nothing_is_known_before_a_step_was_measured() -> None:
    costs = TokenCosts()
    costs.observe(4, 4, 0, 0.0)
    assert costs.step_s(4, 4, 0) == 0.0


def test_the_line_is_found_and_tells_of_other_loads() -> None:
    costs, rng = TokenCosts(), random.Random(3)
    seen = [(1, 1, 0), (16, 16, 0), (16, 32, 1), (4, 12, 3), (1, 8, 7), (8, 8, 0)]
    for number in range(600):
        rows, tokens, proposed = seen[number % len(seen)]
        stops = 3.0 if rng.random() < 0.02 else 1.0
        costs.observe(rows, tokens, proposed, takes(rows, tokens, proposed) * (1 + 0.05 * rng.random()) * stops)
    for load in [*seen, (32, 32, 0), (16, 64, 3), (64, 64, 0), (2, 6, 2)]:
        assert costs.step_s(*load) == pytest.approx(takes(*load), rel=0.2), load
    assert costs.token_s == pytest.approx(LINE[1], rel=0.25)


def test_a_machine_that_gets_slower_is_followed_at_all_loads() -> None:
    """Those that nobody measures any more, too."""
    costs = TokenCosts()
    for factor in (1.0, 1.5):
        for number in range(400):
            rows, tokens, proposed = [(4, 4, 0), (4, 8, 1), (4, 16, 3)][number % (3 if factor == 1.0 else 1)]
            costs.observe(rows, tokens, proposed, factor * takes(rows, tokens, proposed))
    for load in ((4, 4, 0), (4, 8, 1), (4, 16, 3)):
        assert costs.step_s(*load) == pytest.approx(1.5 * takes(*load), rel=0.25), load


def test_a_first_step_that_was_slow_is_forgotten() -> None:
    costs = TokenCosts()
    costs.observe(4, 4, 0, 1.0)  # something was made for the first time
    for _ in range(FIT_AFTER):
        costs.observe(4, 4, 0, takes(4, 4, 0))
    assert costs.step_s(4, 4, 0) == pytest.approx(takes(4, 4, 0), rel=0.05)


def test_no_average_is_less_than_no_time_under_a_steep_line() -> None:
    """Steps of as many tokens as a power of two differ by up to twice, the line by more than one of them takes."""
    costs = TokenCosts()
    for _ in range(3):
        costs.observe(63, 63, 0, 0.1)
    for number in range(600):
        rows = (64, 128, 256)[number % 3]
        costs.observe(rows, rows, 0, rows * 0.1)
    assert 31 * costs.token_s > 0.1
    for _ in range(50):
        costs.observe(32, 32, 0, 0.05)
        assert min(average[0] for average in costs._averages.values()) > 0.0
