"""A prefix of a model whose layers keep states ends where its blocks and a state are there."""

from __future__ import annotations

from app.engine.kv_cache.state_manager import ROLLING, StateManager
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


def test_the_latest_state_of_an_answer_stays() -> None:
    kv = manager(num_kept=3)
    other = make_request(kv, [*range(500, 506)])
    prefill(kv, other)
    kv.free(other, None)
    request = make_request(kv, list(range(6)))
    prefill(kv, request)
    for position in range(8, 2 * ROLLING + 8, SIZE):
        request.token_ids += range(position + 1000, position + 1000 + SIZE)
        kv.grow_each([request])
        kv.take_state_copies()
        kv.publish(request, position)
    assert kv.num_states == 3
    kv.free(request, None)
    assert kv.find_prefix(make_request(kv, [*range(500, 506)])).num_blocks == 1, "its own earlier ones go first"
    follow_up = make_request(kv, [*request.token_ids, 1, 2, 3])
    assert kv.find_prefix(follow_up).num_blocks * SIZE == 2 * ROLLING


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
