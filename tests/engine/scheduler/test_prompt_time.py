"""How many tokens of prompts a step has time for."""

from __future__ import annotations

import pytest

from app.engine.scheduler.prompt_time import MIN_ALONE_TOKENS, MIN_TIMED_TOKENS, PromptTime


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


def test_beside_decodes_a_step_fills_rounds_of_rows_while_rests_are_short() -> None:
    """85 of 100 ms are 850 tokens of 0.1 ms; 44 decodes have 48 places, so the rows are 768."""
    time_of = PromptTime(0.1, grows=True)

    def most(backlog: int = 2000, num_decodes: int = 44, decode_s: float = 0.0) -> int | None:
        return time_of.most_tokens(1e-4, decode_s, backlog, False, first=2000, num_decodes=num_decodes)

    assert most() == 720
    time_of.note(500, 0.09)  # no short step, and no full one
    assert most() == 720
    assert most(decode_s=0.025) == 704, "there is time for two rounds: rounds are no measure"
    assert most(num_decodes=0) == 960, "nobody decodes"
    assert most(backlog=20000) == 1920, "more than ten steps' worth"
    assert PromptTime(0.1).most_tokens(1e-4, 0.0, 2000, False, first=2000, num_decodes=30) == 960, "on a CPU"
    time_of.note(100, 0.08)  # a short step that took as long as a full one
    assert most() == 1152, "no shorter step would be quicker"


def test_a_step_that_was_planned_to_be_far_shorter_tells_the_fixed_part() -> None:
    time_of = PromptTime(0.1, grows=True)

    def most() -> int | None:
        return time_of.most_tokens(1e-4, 0.0, 2000, False, first=2000, num_decodes=44)

    assert most() == 720
    time_of.note(720, 0.11)
    assert most() == 1024, "half as many more, in four bits: a shorter step would be hardly quicker"
    fixed_s = time_of._fixed_s
    time_of.note(720, 0.11)
    assert time_of._fixed_s < fixed_s, "that one was not planned to be shorter"


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


def told(time_of: PromptTime, fixed_s: float, token_s: float, length: int) -> list[int]:
    """Tokens of prompts in steps that take as long as their tokens or as a fixed part, whichever is longer; prompts of
    `length` tokens wait one behind the other."""
    found, rest, seconds = list[int](), length, fixed_s + length * token_s
    for _ in range(400):
        average = seconds / (found[-1] if found else length)
        most = time_of.most_tokens(average, 0.0, 2 * length, False, first=rest)
        assert most is not None
        tokens = min(most, rest)
        rest = rest - tokens or length
        seconds = max(fixed_s, token_s * tokens)
        time_of.note(tokens, seconds)
        found.append(tokens)
    return found


@pytest.mark.parametrize("fixed_s", [0.1, 0.05])
@pytest.mark.parametrize("length", [700, 1000, 1900])
def test_prompts_are_not_cut_where_shorter_steps_are_no_quicker(fixed_s: float, length: int) -> None:
    """A step takes 0.1 s, or 0.05, however few tokens it has: a whole prompt is no longer. Now and then one is cut,
    which tells whether that is so yet."""
    found = told(PromptTime(0.05, grows=True), fixed_s, 1e-5, length)
    assert sum(tokens == length for tokens in found[-200:]) > 160


def test_prompts_are_cut_where_steps_take_as_long_as_their_tokens() -> None:
    found = told(PromptTime(0.05, grows=True), fixed_s=0.0, token_s=1e-4, length=3000)
    assert max(found[-100:]) * 1e-4 < 1.5 * 0.05
    assert sum(found[-100:]) > 100 * 350


def test_what_waits_does_not_make_steps_longer_for_good() -> None:
    """8,192 tokens a step at first, as 100,000 wait; then 1,000 at a time, of 0.1 ms."""
    time_of = PromptTime(0.05, grows=True)
    for _ in range(20):
        time_of.most_tokens(1e-4, 0.005, 100_000, False)
        time_of.note(8192, 0.8)
    for _ in range(1000):
        most = time_of.most_tokens(1e-4, 0.005, 1000, False, first=1000)
        assert most is not None
        time_of.note(min(most, 1000), 1e-4 * min(most, 1000))
    assert most <= 600


@pytest.mark.parametrize("stall_s", [0.2, 1.0, 30.0])
def test_a_step_that_stalled_makes_no_other_long(stall_s: float) -> None:
    """Short steps of 8 ms and full ones of 0.1 ms a token, and one that something held up."""
    time_of = PromptTime(0.025, grows=True)
    for number in range(40):
        most = time_of.most_tokens(1e-4, 0.0, 1500, False)
        assert most is not None
        time_of.note(most, 1e-4 * most)
        time_of.note(50, stall_s if number == 30 else 0.008)
        assert number < 10 or most <= 320


def test_a_prompt_is_not_left_a_small_rest() -> None:
    """480 tokens of 0.1 ms are what 50 ms have time for."""
    assert PromptTime(0.05).most_tokens(1e-4, 0.0, 4000, False, first=600) == 600
    assert PromptTime(0.05).most_tokens(1e-4, 0.0, 4000, False, first=601) == 480
    assert PromptTime(0.05).most_tokens(1e-4, 0.0, 4000, False, first=300) == 480


def test_steps_that_took_no_time_of_their_own_tell_nothing() -> None:
    time_of = PromptTime(0.05, grows=True)
    for prompts_s in (0.0, -0.01):
        time_of.note(100, prompts_s)
    assert time_of.most_tokens(1e-4, 0.0, 4000, False) == 480


def test_a_step_tells_of_prompts_only_where_both_are_in_it() -> None:
    """What its decodes take is taken off; a step of decodes alone tells whether their tokens came in time."""
    noted, told_of = PromptTime(0.05, grows=True), PromptTime(0.05, grows=True)
    for num_tokens, num_decodes in ((500, 0), (0, 20)):
        told_of.observe(num_tokens, num_decodes, 0.04, 0.01)
    assert told_of._token_s == noted._token_s == 0.0
    assert told_of.rounds.left > 0.0
    told_of.observe(500, 20, 0.06, 0.01)
    noted.note(500, 0.06 - 0.01)
    assert told_of._token_s == noted._token_s > 0.0
    assert told_of.rounds.left < 0.0, "20 tokens came late"
