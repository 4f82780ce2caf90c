"""A hung step is told from a long one by the steps that there were."""

from __future__ import annotations

import pytest

from app.engine.step_limit import FLOOR_S, MIN_STEPS, StepLimit

MOST_S = 300.0


def limit_after(durations: list[float], prefill_token_s: float = 1e-4) -> float:
    limit = StepLimit(MOST_S)
    for duration in durations:
        limit.note(duration)
    return limit.limit_s(prefill_token_s, max_step_tokens=2048)


def test_too_few_steps_say_nothing() -> None:
    assert limit_after([0.01] * (MIN_STEPS - 1)) == MOST_S
    assert limit_after([0.01] * MIN_STEPS) < MOST_S


def test_short_steps_have_the_least_limit() -> None:
    assert limit_after([0.01] * 1000) == FLOOR_S


def test_ten_times_the_slow_ones_but_not_the_slowest() -> None:
    assert limit_after([0.01] * 980 + [2.0] * 20) == pytest.approx(20.0)
    assert limit_after([0.01] * 999 + [2.0]) == FLOOR_S


def test_a_step_of_the_largest_size_stays_below() -> None:
    """Decodes alone, as measured, do not make a prefill of 2048 tokens a hang."""
    assert limit_after([0.01] * 1000, prefill_token_s=0.005) == pytest.approx(10 * 2048 * 0.005)
    assert limit_after([0.01] * 1000, prefill_token_s=0.0) == MOST_S


def test_old_steps_are_forgotten_and_the_option_is_the_upper_bound() -> None:
    assert limit_after([2.0] * 1000 + [0.01] * 1000) == FLOOR_S
    assert limit_after([60.0] * 1000) == MOST_S
