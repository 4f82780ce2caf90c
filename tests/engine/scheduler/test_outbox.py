"""The next letter's diffs: nothing is sent that became moot."""

from __future__ import annotations

from app.engine.request import Request
from app.engine.sampling_params import SamplingParams
from app.engine.scheduler.outbox import Outbox


def request(row: int, blocks: list[int]) -> Request:
    made = Request("r", SamplingParams(seed=1), [1, 2, 3], 2, 9, (7,), frozenset(), b"")
    made.row, made.block_ids = row, blocks
    return made


def test_everything_is_sent_once() -> None:
    outbox = Outbox()
    outbox.row_left(1)
    outbox.blocks_added(2, [5])
    outbox.blocks_added(2, [6])
    outbox.blocks_added(3, [])
    assert outbox.take_freed_rows() == [1]
    assert outbox.take_new_blocks() == [(2, [5, 6])]
    assert (outbox.take_freed_rows(), outbox.take_new_blocks(), outbox.take_new_requests()) == ([], [], [])


def test_a_new_request_is_sent_with_the_blocks_it_holds_by_then() -> None:
    outbox = Outbox()
    entering = request(4, [1])
    outbox.row_entered(entering, 2)
    entering.block_ids.append(8)
    outbox.blocks_added(4, [8])
    (new,) = outbox.take_new_requests()
    assert (new.row, new.block_ids, new.num_computed_tokens) == (4, [1, 8], 2)
    assert (new.token_ids.tolist(), new.num_prompt_tokens, new.eos_token_ids) == ([1, 2, 3], 2, (7,))
    assert outbox.take_new_blocks() == []
    entering.block_ids.append(9)
    assert new.block_ids == [1, 8]  # a letter is a copy


def test_blocks_of_a_row_that_was_left_are_forgotten() -> None:
    outbox = Outbox()
    outbox.blocks_added(2, [5])
    outbox.row_left(2)
    assert outbox.take_new_blocks() == []
    assert outbox.take_freed_rows() == [2]


def test_a_request_that_came_and_went_is_never_mentioned() -> None:
    outbox = Outbox()
    outbox.row_entered(request(3, [1]), 0)
    outbox.row_left(3)
    assert outbox.take_new_requests() == []
    assert outbox.take_freed_rows() == []
