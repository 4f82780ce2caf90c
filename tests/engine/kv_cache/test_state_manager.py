"""A prefix of a model whose layers keep states ends where its blocks and a state are there."""

from __future__ import annotations

import pytest

from app.engine.kv_cache.state_manager import FEW, ROLLING, StateManager
from app.records.request_state import Request
from app.records.state_pool import StatePool
from app.records.step import StateCopy
from tests.engine.kv_cache.test_kv_cache_manager import make_request

SIZE = 4


def manager(num_kept: int = 8) -> StateManager:
    return StateManager(400, SIZE, StatePool(64, num_kept), hash_key=b"key")


def num_free_slots(kv: StateManager) -> int:
    return len(kv._kept._free or ())


def prefill(kv: StateManager, request: Request, row: int = 0) -> list[tuple[int, int, tuple[int, ...]]]:
    """Compute the prompt in as few chunks as borders allow: (begin, end, slots that its state was left in)."""
    hit = kv.find_prefix(request)
    assert kv.admit(request, hit, request.num_tokens)
    request.row, begin, chunks = row, hit.num_blocks * SIZE, []
    while begin < request.num_tokens:
        end = kv.cut(request, begin, request.num_tokens)
        kv.chunk_begins(request, begin)
        copies = kv.take_state_copies()
        stores = () if copies is None else tuple(copy.slot for copy in copies.stores)
        assert copies is None or {copy.row for copy in copies.stores} <= {row}
        chunks.append((begin, end, stores))
        kv.publish(request, end)
        begin = end
    return chunks


def test_a_prompt_leaves_a_state_at_its_last_full_block() -> None:
    kv = manager()
    first = make_request(kv, list(range(23)))
    chunks = prefill(kv, first)
    assert [(begin, end) for begin, end, _ in chunks] == [(0, 20), (20, 23)]
    assert len(chunks[1][2]) == 1, "once its tokens are computed"
    kv.free(first, None)
    again = make_request(kv, [*range(20), 50, 51])
    assert kv.find_prefix(again).num_blocks == 5
    shorter = make_request(kv, list(range(15)))
    assert kv.find_prefix(shorter).num_blocks == 0, "its blocks are there, but no state"


def test_the_state_behind_a_hit_comes_with_the_next_message() -> None:
    kv = manager()
    first = make_request(kv, list(range(23)))
    (slot,) = prefill(kv, first)[1][2]
    kv.free(first, None)
    again = make_request(kv, list(range(23)))
    hit = kv.find_prefix(again)
    assert kv.admit(again, hit, 23)
    again.row = 3
    copies = kv.take_state_copies()
    assert copies is not None
    assert (copies.loads, copies.stores) == ([StateCopy(3, slot, [])], [])
    assert kv.take_state_copies() is None


def test_a_fork_leaves_a_state_for_its_siblings() -> None:
    kv = manager()
    first = make_request(kv, list(range(40)))
    prefill(kv, first)
    kv.free(first, None)
    second = make_request(kv, [*range(21), *range(100, 119)])
    chunks = prefill(kv, second, row=1)
    assert [(begin, end) for begin, end, _ in chunks] == [(0, 20), (20, 36), (36, 40)]
    third = make_request(kv, [*range(21), *range(200, 219)])
    assert kv.find_prefix(third).num_blocks == 5


def test_siblings_wait_for_a_state_that_is_coming() -> None:
    kv = manager()
    first, second = (make_request(kv, list(range(23))) for _ in "ab")
    assert kv.admit(first, kv.find_prefix(first), 23)
    assert kv.num_coming(second, 0) == 5
    kv.free(first, None)
    assert kv.num_coming(second, 0) == 0, "it will not come after all"


def decode(kv: StateManager, requests: list[Request], num_tokens: int) -> list[int]:
    """Each of them answers with so many tokens; a step comes back before the next one. Tokens behind which the first
    one's state was copied."""
    left = []
    for _ in range(num_tokens):
        for request in requests:
            request.token_ids.append(1000 + request.num_tokens)
        kv.grow_each([request for request in requests if kv.num_slots(request) < request.num_tokens])
        copies = kv.take_state_copies()
        if copies is not None and copies.stores:
            left.append(requests[0].num_tokens - 1)
        for request in requests:
            kv.publish(request, request.num_tokens)
    return left


def test_the_latest_state_of_an_answer_stays() -> None:
    kv = manager(num_kept=3)
    other = make_request(kv, [*range(500, 506)])
    prefill(kv, other)
    kv.free(other, None)
    request = make_request(kv, list(range(6)))
    prefill(kv, request)
    decode(kv, [request], 30 * SIZE)
    assert kv.num_states == 2, "an answer's earlier ones are gone, and its prompt's had to give way"
    kv.free(request, None)
    kv.pool.check()
    assert kv.find_prefix(make_request(kv, [*range(500, 506)])).num_blocks == 1, "its own earlier ones go first"


def test_answers_displace_nothing_but_their_own_states() -> None:
    """However long one gets: what it has left lies in as many blocks as two copies take."""
    kv = StateManager(100, SIZE, StatePool(64, None, 3), hash_key=b"key")
    other = make_request(kv, [*range(500, 510)])
    prefill(kv, other)
    kv.free(other, None)
    request = make_request(kv, list(range(7)))
    prefill(kv, request)
    assert kv.pool.num_cached == 2 + 3 + 1 + 3, "blocks of both prompts, and a state behind each"
    decode(kv, [request], 40 * SIZE)
    assert kv.pool.num_cached == 2 + 3 + 41 + 3 + 3
    kv.free(request, None)
    assert kv.num_states == 3
    kv.pool.check()


@pytest.mark.parametrize("length", range(6, 6 + 2 * SIZE))
def test_a_next_turn_finds_all_full_blocks_of_an_answer(length: int) -> None:
    kv = manager()
    request = make_request(kv, list(range(7)))
    prefill(kv, request)
    decode(kv, [request], length)
    kv.free(request, None)
    follow_up = make_request(kv, [*request.token_ids, 1, 2, 3])
    assert kv.find_prefix(follow_up).num_blocks == (7 + length - 1) // SIZE


@pytest.mark.parametrize(
    ("running", "blocks"), [(1, 1), (FEW, 1), (FEW + 1, 2), (2 * FEW + 1, 4), (50 * FEW, ROLLING // SIZE)]
)
def test_many_answers_leave_states_more_rarely(running: int, blocks: int) -> None:
    kv = StateManager(40 * running + 400, SIZE, StatePool(64, running + 50), hash_key=b"key")
    requests = [make_request(kv, [10_000 * number, 1, 2]) for number in range(running)]
    for request in requests:
        prefill(kv, request)
    left = decode(kv, requests[:1], 40 * SIZE)
    assert left == list(range(blocks * SIZE, 41 * SIZE, blocks * SIZE))


def test_slots_are_evicted_least_recently_used_first_and_never_lost() -> None:
    kv = manager(num_kept=2)
    for number in range(5):
        request = make_request(kv, [1000 * number + i for i in range(10)])
        prefill(kv, request)
        kv.free(request, None)
    assert kv.num_states == 2
    for number, found in ((3, 2), (4, 2), (0, 0)):
        request = make_request(kv, [1000 * number + i for i in range(10)])
        assert kv.find_prefix(request).num_blocks == found
    kv.forget()
    assert (kv.num_states, num_free_slots(kv)) == (0, 2)


def test_a_copy_that_no_message_has_named_is_none() -> None:
    kv = manager(num_kept=1)
    request = make_request(kv, list(range(23)))
    assert kv.admit(request, kv.find_prefix(request), 23)
    kv.chunk_begins(request, 20)
    kv.free(request, None)
    assert (kv.num_states, num_free_slots(kv), kv.take_state_copies()) == (0, 1, None)
