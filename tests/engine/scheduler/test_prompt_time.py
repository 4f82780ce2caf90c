"""How many tokens of prompts a step has time for."""

from __future__ import annotations

import pytest

from app.engine.scheduler.prompt_time import MIN_ALONE_TOKENS, MIN_TIMED_TOKENS, PromptTime


def tokens(token_s: float, decode_s: float = 0.0, backlog: int = 10**4, *, is_alone: bool = False) -> int | None:
    return PromptTime(0.05).most_tokens(token_s, decode_s, backlog, is_alone)


@pytest.mark.parametrize(
    ("token_s", "is_alone", "most"),
    [
        (1e-4, False, 448),  # 460 take as long as a step is planned; four bits of it
        (1e-4, True, 1920),  # 2,000 take 0.2 s, and a float is a little less: nobody else waits, but somebody may come
        (1e-2, False, MIN_TIMED_TOKENS),  # too slow for any step to be short
        (1e-2, True, MIN_ALONE_TOKENS),
        (0.0, False, None),  # not measured yet
    ],
)
def test_a_step_has_as_many_tokens_of_prompts_as_it_has_time_for(
    token_s: float, is_alone: bool, most: int | None
) -> None:
    assert tokens(token_s, is_alone=is_alone) == most


def test_a_lone_prompt_is_not_cut_for_a_small_rest() -> None:
    """2,000 tokens take 0.2 s."""
    assert tokens(1e-4, backlog=2400, is_alone=True) == 2400
    assert tokens(1e-4, backlog=2600, is_alone=True) == 1920
    assert tokens(1e-4, backlog=0, is_alone=True) == 1920, "what waits is an estimate"


def test_decodes_take_their_part_of_the_time() -> None:
    assert tokens(1e-4, decode_s=0.024) == 208
    assert tokens(1e-4, decode_s=0.06) == MIN_TIMED_TOKENS


def test_steps_grow_with_what_waits_only_where_they_may() -> None:
    growing = PromptTime(0.05, grows=True)
    assert growing.most_tokens(1e-4, 0.0, 4000, False) == 448
    assert growing.most_tokens(1e-4, 0.0, 10240, False) == 1024
    assert tokens(1e-4, backlog=10240) == 448


def test_without_a_time_there_is_no_limit() -> None:
    assert PromptTime(0.0, grows=True).most_tokens(1e-4, 0.0, 10**6, False) is None


def test_steps_of_decodes_alone_follow_one_that_cannot_be_short() -> None:
    """128 tokens of 0.7 ms and decodes of 5 ms: every second step has prompts, and the average is below 50 ms."""
    time_of, token_s, decode_s = PromptTime(0.05), 7e-4, 0.005
    found = [time_of.most_tokens(token_s, decode_s, 4000, False) for _ in range(6)]
    assert found == [MIN_TIMED_TOKENS, 0, MIN_TIMED_TOKENS, 0, MIN_TIMED_TOKENS, 0]
    assert sum(tokens * token_s + decode_s for tokens in found if tokens is not None) / 6 < 0.05
    slower = [time_of.most_tokens(4 * token_s, decode_s, 4000, False) for _ in range(6)]
    assert slower == [MIN_TIMED_TOKENS, 0, 0] * 2, "no more than two, or prompts would starve"


@pytest.mark.parametrize(
    ("decode_s", "backlog"),
    [
        (0.0, 4000),  # nobody decodes
        (0.005, 50),  # the step has so few tokens of prompts that it is short enough
    ],
)
def test_no_step_is_without_prompts_where_nobody_waits_or_the_step_is_short(decode_s: float, backlog: int) -> None:
    time_of = PromptTime(0.05)
    assert {time_of.most_tokens(7e-4, decode_s, backlog, False) for _ in range(4)} == {MIN_TIMED_TOKENS}


def test_decodes_that_take_longer_than_a_step_shall_leave_every_second_step_to_prompts() -> None:
    time_of = PromptTime(0.05)
    assert [time_of.most_tokens(1e-3, 0.06, 4000, False) for _ in range(4)] == [MIN_TIMED_TOKENS, 0] * 2


def test_a_budget_that_holds_few_tokens_needs_no_pause() -> None:
    """40 tokens of 0.7 ms are within the 50 ms of a step, whatever 128 of them would take."""
    time_of = PromptTime(0.05)
    found = [time_of.most_tokens(7e-4, 0.005, 4000, False, room=40) for _ in range(4)]
    assert 0 not in found


def told(time_of: PromptTime, fixed_s: float, token_s: float, steps: int = 300) -> list[int]:
    """Tokens of prompts in steps that take as long as their tokens or as a fixed part, whichever is longer; prompts of
    1,000 tokens come, and a rest of one is a step of its own."""
    found, rest = list[int](), 0
    for _ in range(steps):
        average = max(fixed_s, token_s * 500) / 500  # of what steps have had: it is not what a long one costs
        most = time_of.most_tokens(average, 0.0, rest or 1000, False)
        assert most is not None
        tokens = min(most, rest or 1000)
        rest = (rest or 1000) - tokens
        time_of.note(tokens, max(fixed_s, token_s * tokens))
        found.append(tokens)
    return found


def test_prompts_are_not_cut_where_shorter_steps_are_no_quicker() -> None:
    """A step takes 0.1 s, or 0.05, however few tokens it has: a whole prompt is no longer. Where steps take as long as
    their tokens, those of 1 ms for ten, prompts are cut to what fits."""
    for fixed_s in (0.1, 0.05):
        found = told(PromptTime(0.05, grows=True), fixed_s=fixed_s, token_s=1e-5)
        assert found[-20:] == [1000] * 20
    found = told(PromptTime(0.05, grows=True), fixed_s=0.0, token_s=1e-4)
    assert max(found[-20:]) * 1e-4 < 0.05
    found = told(PromptTime(0.05), fixed_s=0.1, token_s=1e-5)
    assert max(found[-20:]) < 500, "where steps do not grow, they keep their time"


def test_a_small_rest_is_not_left_to_a_step_of_its_own() -> None:
    """440 tokens of 0.1 ms are what 46 ms have time for."""
    assert tokens(1e-4, backlog=500) == 500
    assert tokens(1e-4, backlog=540) == 448


def test_steps_that_took_no_time_of_their_own_tell_nothing() -> None:
    time_of = PromptTime(0.05, grows=True)
    for prompts_s in (0.0, -0.01):
        time_of.note(100, prompts_s)
    assert time_of.most_tokens(1e-4, 0.0, 4000, False) == 448
