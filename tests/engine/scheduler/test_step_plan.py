"""How a step's tokens are shared among prompts."""

from __future__ import annotations

import pytest

from app.engine.scheduler.step_plan import MOST_WHOLE_PROMPTS, TokenBudget


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


@pytest.mark.parametrize(("most", "left"), [(256, 256), (4096, 2048), (None, 2048)])
def test_prompts_get_no_more_than_there_is_time_for(most: int | None, left: int) -> None:
    budget = TokenBudget(2048)
    budget.limit(most)
    assert budget.left == left


def test_what_cannot_be_cut_keeps_its_tokens() -> None:
    encoder = TokenBudget(2048, whole_prompts=True)
    encoder.limit(256)
    assert encoder.left == 2048


def test_a_step_takes_so_many_whole_prompts() -> None:
    budget = TokenBudget(2048, whole_prompts=True)
    for _ in range(MOST_WHOLE_PROMPTS):
        assert budget.chunk(3) == 3
        budget.spend(3, 3)
    assert budget.left == 0
