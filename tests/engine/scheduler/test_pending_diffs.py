"""The next step message's diffs: nothing is sent that became moot."""

from __future__ import annotations

from app.engine.scheduler.pending_diffs import PendingDiffs
from app.records.request import EngineRequest
from app.records.request_state import Request
from app.records.sampling_params import SamplingParams


def request(row: int, blocks: list[int]) -> Request:
    made = Request(EngineRequest("r", [], SamplingParams(seed=1)), [1, 2, 3], 2, 9, (7,), frozenset(), b"")
    made.row, made.block_ids = row, blocks
    return made


def test_everything_is_sent_once() -> None:
    diffs = PendingDiffs()
    diffs.leave_row(1)
    diffs.add_blocks(2, [5])
    diffs.add_blocks(2, [6])
    diffs.add_blocks(3, [])
    assert diffs.take_freed_rows() == [1]
    assert diffs.take_new_blocks() == [(2, [5, 6])]
    assert (diffs.take_freed_rows(), diffs.take_new_blocks(), diffs.take_new_requests()) == ([], [], [])


def test_a_new_request_is_sent_with_the_blocks_it_holds_by_then() -> None:
    diffs = PendingDiffs()
    entering = request(4, [1])
    diffs.enter_row(entering, 2)
    entering.block_ids.append(8)
    diffs.add_blocks(4, [8])
    (new,) = diffs.take_new_requests()
    assert (new.row, new.block_ids, new.num_computed_tokens) == (4, [1, 8], 2)
    assert (new.token_ids.tolist(), new.num_prompt_tokens, new.eos_token_ids) == ([1, 2, 3], 2, (7,))
    assert diffs.take_new_blocks() == []
    entering.block_ids.append(9)
    assert new.block_ids == [1, 8]  # a step message is a copy


def test_blocks_of_a_row_that_was_left_are_forgotten() -> None:
    diffs = PendingDiffs()
    diffs.add_blocks(2, [5])
    diffs.leave_row(2)
    assert diffs.take_new_blocks() == []
    assert diffs.take_freed_rows() == [2]


def test_a_request_that_came_and_went_is_never_mentioned() -> None:
    diffs = PendingDiffs()
    diffs.enter_row(request(3, [1]), 0)
    diffs.leave_row(3)
    assert diffs.take_new_requests() == []
    assert diffs.take_freed_rows() == []
