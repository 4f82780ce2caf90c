"""How a step's tokens are shared among prompts."""

from __future__ import annotations

import pytest

from app.engine.scheduler.step_plan import MIN_TIMED_TOKENS, TokenBudget


def opened(left: int, crowded: bool) -> TokenBudget:
    budget = TokenBudget(left)
    budget.open_prefills(crowded)
    return budget


def test_alone_a_long_prompt_gets_everything() -> None:
    assert opened(100, crowded=False).chunk(1000) == 100


def test_in_a_crowd_long_prompts_share_one_half() -> None:
    budget = opened(100, crowded=True)
    chunk = budget.chunk(1000)
    assert chunk == 50
    budget.spend(chunk, 1000)
    assert budget.chunk(1000) == 0  # the next long one waits
    assert budget.chunk(20) == 20  # a short one gets in


def test_short_prompts_never_take_the_long_ones_half_before_it_was_offered() -> None:
    budget = opened(100, crowded=True)
    budget.spend(budget.chunk(25), 25)
    assert budget.chunk(1000) == 50


def test_one_token_is_still_something() -> None:
    budget = opened(1, crowded=True)
    assert budget.chunk(1000) == 1
    budget.spend(1, 1000)
    assert budget.left == 0
    assert budget.chunk(1) == 0


@pytest.mark.parametrize(
    ("token_s", "is_alone", "left"),
    [
        (1e-4, False, 256),  # 500 would take as long as a step shall
        (1e-4, True, 1024),  # nobody else waits, but somebody may come
        (1e-2, False, MIN_TIMED_TOKENS),  # too slow for any step to be short
        (1e-6, False, 2048),
        (0.0, False, 2048),  # not measured yet
    ],
)
def test_a_step_has_as_many_tokens_of_prompts_as_it_has_time_for(token_s: float, is_alone: bool, left: int) -> None:
    budget = TokenBudget(2048)
    budget.limit_time(0.05, token_s, is_alone)
    assert budget.left == left


def test_what_cannot_be_cut_or_is_not_limited_keeps_its_tokens() -> None:
    encoder, unlimited = TokenBudget(2048, whole_prompts=True), TokenBudget(2048)
    encoder.limit_time(0.05, 1e-3, is_alone=False)
    unlimited.limit_time(0.0, 1e-3, is_alone=False)
    assert (encoder.left, unlimited.left) == (2048, 2048)
