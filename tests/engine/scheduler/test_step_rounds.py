"""Tokens of prompts beside decodes, by rounds of rows and by how many tokens came late."""

from __future__ import annotations

import pytest

from app.engine.scheduler.step_rounds import LATE, MOST_LEFT, StepRounds


@pytest.mark.parametrize(
    ("num_decodes", "time_for", "tokens"),
    [
        (44, 800.0, 720),  # with 48 places 768 rows, which is less than there is time for
        (44, 670.0, 720),  # a fifth of a round is missing
        (44, 920.0, 720),
        (44, 930.0, 976),
        (30, 800.0, 736),  # 32 places
        (10, 810.0, 752),  # 16 places
        (200, 750.0, 568),  # more rows than any captured step has places for
        (44, 660.0, 0),  # two rounds: rounds are no measure
        (30, -300.0, 0),  # decodes alone take too long
    ],
)
def test_a_step_has_whole_rounds_of_rows(num_decodes: int, time_for: float, tokens: int) -> None:
    assert StepRounds().tokens(num_decodes, time_for, backlog=2000, first=2000) == tokens


def test_a_round_more_while_many_prompts_wait_and_few_tokens_came_late() -> None:
    rounds = StepRounds()

    def tokens(backlog: int) -> int:
        return rounds.tokens(44, 800.0, backlog, first=5000)

    assert tokens(5000) == 720, "nothing has come in time yet"
    rounds.count(1000, is_late=False)
    assert (tokens(5000), tokens(2160)) == (976, 720)
    rounds.count(5, is_late=True)
    assert tokens(5000) == 976
    rounds.count(6, is_late=True)
    assert tokens(5000) == 720, "more than one in a hundred came late"
    rounds.count(200, is_late=False)
    assert tokens(5000) == 976


def test_the_number_of_rounds_stays_while_it_is_nearly_right() -> None:
    rounds = StepRounds()
    found = [rounds.tokens(44, time_for, 1000, 1000) for time_for in (800.0, 1020.0, 680.0, 1030.0, 940.0, 920.0)]
    assert found == [720, 720, 720, 976, 976, 720]
    assert rounds.usual == 720
    assert (rounds.tokens(44, 100.0, 1000, 1000), rounds.usual) == (0, 0)


def test_what_others_make_up_for_is_bounded() -> None:
    rounds = StepRounds()
    rounds.count(10**6, is_late=False)
    assert rounds.left == MOST_LEFT
    rounds.count(10**6, is_late=True)
    assert rounds.left == -MOST_LEFT
    rounds.count(int(MOST_LEFT / LATE) + 100, is_late=False)
    assert rounds.left > 0.0


def test_beside_few_a_prompt_that_can_end_with_a_round_more_does() -> None:
    rounds = StepRounds()
    assert rounds.tokens(16, 810.0, backlog=1024, first=1024) == 752, "nothing has come in time yet"
    rounds.count(1000, is_late=False)
    assert rounds.tokens(16, 810.0, backlog=1024, first=1024) == 1024, "1,040 rows, hardly more than 1,024"
    assert rounds.usual == 752
    assert rounds.tokens(17, 810.0, backlog=1024, first=1024) == 744
    assert rounds.tokens(16, 810.0, backlog=1100, first=1100) == 752, "it would take a second step all the same"
    assert rounds.tokens(16, 810.0, backlog=1800, first=700) == 752, "others have the rest"
