"""How many tokens of prompts a step has time for."""

from __future__ import annotations

import random

import pytest

from app.engine.scheduler.prompt_time import IN_TIME, MIN_ALONE_TOKENS, MIN_TIMED_TOKENS, MOST_MARGIN, PromptTime


def tokens(token_s: float, decode_s: float = 0.0, backlog: int = 10**4, *, is_alone: bool = False) -> int | None:
    return PromptTime(0.05).most_tokens(token_s, decode_s, backlog, is_alone)


@pytest.mark.parametrize(
    ("token_s", "is_alone", "most"),
    [
        (1e-4, False, 480),  # 500 take as long as a step shall; four bits of it
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
    assert tokens(1e-4, decode_s=0.024) == 256
    assert tokens(1e-4, decode_s=0.06) == MIN_TIMED_TOKENS


def test_steps_grow_with_what_waits_only_where_they_may() -> None:
    growing = PromptTime(0.05, grows=True)
    assert growing.most_tokens(1e-4, 0.0, 4000, False) == 480
    assert growing.most_tokens(1e-4, 0.0, 10240, False) == 1024
    assert tokens(1e-4, backlog=10240) == 480


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


@pytest.mark.parametrize("is_told", [False, True])
def test_steps_are_planned_shorter_where_more_than_a_few_are_late(is_told: bool) -> None:
    """Times that are up to a fifth longer than they are on average, or as much shorter."""
    time_of, rng, late = PromptTime(0.05), random.Random(0), []
    for _ in range(3000):
        tokens = time_of.most_tokens(1e-5, 0.005, 10**5, False)
        assert tokens is not None
        expected_s = 0.005 + tokens * 1e-5
        step_s = expected_s * rng.uniform(0.8, 1.2)
        late.append(step_s > 0.05)
        if is_told:
            time_of.note(expected_s, step_s)
    share = sum(late[500:]) / len(late[500:])
    assert share < 2.0 * (1.0 - IN_TIME) if is_told else share > 0.25


def test_only_steps_that_are_as_long_as_they_may_be_tell_how_late_steps_are() -> None:
    time_of = PromptTime(0.05)
    for expected_s in (0.01, 0.06):  # of few tokens; longer on purpose, as much waits
        for _ in range(100):
            time_of.note(expected_s, 0.1)
    assert time_of.most_tokens(1e-4, 0.0, 0, False) == 480
    for _ in range(100):
        most = time_of.most_tokens(1e-4, 0.0, 0, False)
        assert most is not None
        time_of.note(most * 1e-4, 0.1)
    assert most == 320, f"no more than {MOST_MARGIN} times shorter"
