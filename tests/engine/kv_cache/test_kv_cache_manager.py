"""Blocks of requests: prefix lookup, growth, publication, release."""

from __future__ import annotations

from app.engine.kv_cache.kv_cache_manager import KVCacheManager
from app.engine.kv_cache.prefix_hit import NO_HIT
from app.records.request import EngineRequest
from app.records.request_state import Request
from app.records.sampling_params import SamplingParams


def make(num_blocks: int = 16, **options: bool) -> KVCacheManager:
    return KVCacheManager(num_blocks, 4, hash_key=b"key", **options)


def make_request(kv: KVCacheManager, tokens: list[int], root: bytes = b"r" * 16, **params: int) -> Request:
    request = Request(
        EngineRequest("r", [], SamplingParams(seed=0, max_tokens=8, **params)),
        token_ids=list(tokens),
        num_prompt_tokens=len(tokens),
        max_total_tokens=len(tokens) + 8,
        eos_token_ids=(),
        stop_token_ids=frozenset(),
        root_hash=root,
        owes_prompt_logprobs="prompt_logprobs" in params,
    )
    kv.hash_known(request)
    return request


def compute(kv: KVCacheManager, request: Request) -> None:
    assert kv.admit(request, kv.find_prefix(request), request.num_tokens)
    kv.publish(request, request.num_tokens)


def test_a_second_request_finds_the_first_ones_blocks() -> None:
    kv = make()
    first = make_request(kv, list(range(10)))
    compute(kv, first)
    second = make_request(kv, [*range(8), 99])
    assert kv.find_prefix(second).table == first.block_ids[:2]


def test_the_whole_prompt_is_never_a_hit() -> None:
    kv = make()
    compute(kv, make_request(kv, list(range(8))))
    assert kv.find_prefix(make_request(kv, list(range(8)))).num_blocks == 1
    assert kv.find_prefix(make_request(kv, [*range(8), 8])).num_blocks == 2


def test_another_root_finds_nothing() -> None:
    kv = make()
    compute(kv, make_request(kv, list(range(9))))
    assert kv.find_prefix(make_request(kv, list(range(9)), root=b"s" * 16)).num_blocks == 0


def test_prompt_logprobs_skip_the_read_until_they_are_delivered() -> None:
    kv = make()
    compute(kv, make_request(kv, list(range(9))))
    request = make_request(kv, list(range(9)), prompt_logprobs=1)
    assert kv.find_prefix(request).num_blocks == 0
    request.owes_prompt_logprobs = False
    assert kv.find_prefix(request).num_blocks == 2


def test_only_computed_full_blocks_are_published() -> None:
    kv = make()
    request = make_request(kv, list(range(12)))
    assert kv.admit(request, NO_HIT, 12)
    kv.publish(request, 7)
    assert kv.pool.num_cached == 1
    kv.publish(request, 7)
    assert kv.pool.num_cached == 1
    kv.publish(request, 12)
    assert kv.pool.num_cached == 3


def test_output_tokens_extend_the_chain() -> None:
    kv = make()
    request = make_request(kv, list(range(6)))
    compute(kv, request)
    request.token_ids += [6, 7, 8, 9]
    assert kv.grow(request, 10) == request.block_ids[2:]
    kv.publish(request, 9)
    assert kv.find_prefix(make_request(kv, list(range(20)))).num_blocks == 2
    assert request.block_hashes == make_request(kv, list(range(8))).block_hashes


def test_admit_and_grow_change_nothing_when_blocks_are_short() -> None:
    kv = make(3)
    request = make_request(kv, list(range(16)))
    assert not kv.admit(request, NO_HIT, 16)
    assert request.block_ids == []
    assert kv.admit(request, NO_HIT, 8)
    assert kv.grow(request, 16) is None
    assert (len(request.block_ids), kv.pool.num_free) == (2, 1)
    assert kv.grow(request, 8) == []


def test_a_hit_on_free_blocks_does_not_count_them_twice() -> None:
    kv = make(4)
    first = make_request(kv, list(range(12)))
    compute(kv, first)
    kv.free(first, None)
    assert kv.pool.num_free == 4
    second = make_request(kv, list(range(100, 104)))
    compute(kv, second)
    third = make_request(kv, [*range(12), *range(50, 58)])
    prefix = kv.find_prefix(third)
    assert prefix.num_blocks == 3  # all evictable, so there are none left for the two further blocks
    assert kv.num_free_after_hit(prefix) == 0
    assert not kv.admit(third, prefix, 20)
    assert kv.pool.num_free == 3
    kv.pool.check()


def test_release_waits_for_the_step_in_flight() -> None:
    kv = make(4)
    request = make_request(kv, list(range(12)))
    compute(kv, request)
    kv.free(request, 7)
    assert (request.block_ids, kv.pool.num_free) == ([], 1)
    kv.pool.release_until(7)
    assert kv.pool.num_free == 4


def test_without_prefix_caching_nothing_is_hashed() -> None:
    kv = make(enable_prefix_caching=False)
    request = make_request(kv, list(range(12)))
    compute(kv, request)
    assert request.block_hashes == []
    assert kv.pool.num_cached == 0
    assert kv.find_prefix(make_request(kv, list(range(12)))).num_blocks == 0
