"""Decodes dealt into as many step messages as the pipeline has stages."""

from __future__ import annotations

import numpy as np

from app.engine.scheduler.micro_batches import micro_batch


def deal(last_step: list[int], next_step: int, last_returned: int, num_stages: int) -> list[int]:
    rows = np.arange(len(last_step))
    return micro_batch(rows, np.array(last_step), next_step, last_returned, num_stages).tolist()


def test_rows_of_the_steps_just_before_wait() -> None:
    assert deal([1, 2, 1, 2], next_step=3, last_returned=0, num_stages=2) == [0, 2]
    assert deal([1, 2, 3], next_step=4, last_returned=0, num_stages=3) == [0]


def test_a_row_whose_token_is_back_need_not_wait() -> None:
    assert deal([5], next_step=6, last_returned=4, num_stages=2) == []
    assert deal([5], next_step=6, last_returned=5, num_stages=2) == [0]


def test_no_step_takes_more_than_its_share_and_the_longest_unserved_come_first() -> None:
    assert deal([1, 1, 1, 1, 1], next_step=9, last_returned=1, num_stages=2) == [0, 1, 2]
    assert deal([4, 1, 3, 2], next_step=9, last_returned=4, num_stages=2) == [1, 3]


def test_all_rows_are_served_in_turn() -> None:
    last = np.zeros(10, np.int64)
    for step in range(1, 31):
        taken = micro_batch(np.arange(10), last, step, max(0, step - 4), 3)
        last[taken] = step
    assert (last > 30 - 3 * 2).all()
    assert len(set(last.tolist())) == 3
