"""How many tokens of prompts a step has time for."""

from __future__ import annotations

import pytest

from app.engine.scheduler.prompt_time import MIN_ALONE_TOKENS, MIN_TIMED_TOKENS, PromptTime


def tokens(token_s: float, decode_s: float = 0.0, backlog: int = 0, *, is_alone: bool = False) -> int | None:
    return PromptTime(0.05).most_tokens(token_s, decode_s, backlog, is_alone)


@pytest.mark.parametrize(
    ("token_s", "is_alone", "most"),
    [
        (1e-4, False, 448),  # 500 take as long as a step shall; three bits of it
        (1e-4, True, 1792),  # 2,000 take 0.2 s, and a float is a little less: nobody else waits, but somebody may come
        (1e-2, False, MIN_TIMED_TOKENS),  # too slow for any step to be short
        (1e-2, True, MIN_ALONE_TOKENS),
        (0.0, False, None),  # not measured yet
    ],
)
def test_a_step_has_as_many_tokens_of_prompts_as_it_has_time_for(
    token_s: float, is_alone: bool, most: int | None
) -> None:
    assert tokens(token_s, is_alone=is_alone) == most


def test_decodes_take_their_part_of_the_time() -> None:
    assert tokens(1e-4, decode_s=0.024) == 256
    assert tokens(1e-4, decode_s=0.06) == MIN_TIMED_TOKENS


def test_steps_grow_with_what_waits_only_where_they_may() -> None:
    growing = PromptTime(0.05, grows=True)
    assert growing.most_tokens(1e-4, 0.0, 4000, False) == 448
    assert growing.most_tokens(1e-4, 0.0, 10240, False) == 1024
    assert tokens(1e-4, backlog=10240) == 448


def test_without_a_time_there_is_no_limit() -> None:
    assert PromptTime(0.0, grows=True).most_tokens(1e-4, 0.0, 10**6, False) is None
