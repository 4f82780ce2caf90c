"""The engine's entry: limits, ranges, defaults; every refusal names its field."""

from __future__ import annotations

import time
from typing import Any

import pytest

from app.engine.kv_cache.kv_cache_manager import KVCacheManager
from app.engine.scheduler.admission import Admission
from app.errors import PromptTooLongError
from app.records.adapter import AdapterAsk
from app.records.request import EngineRequest, Placement
from app.records.request_bounds import RequestBounds
from app.records.request_state import Request
from app.records.sampling_params import SamplingParams


def admit(
    prompt: Any, *, num_blocks: int = 16, max_model_len: int = 50, request: dict[str, Any] | None = None, **params: Any
) -> Request:
    kv = KVCacheManager(num_blocks, 4, hash_key=b"key")
    admission = Admission(kv, RequestBounds(100, (2,), max_model_len), model="m", block_hash_key=b"key")
    return admission.admit(EngineRequest("r", prompt, SamplingParams(**params), **(request or {})))


def test_a_good_request_is_filled_in() -> None:
    request = admit([1, 2, 3, 4, 5])
    assert request.spec.sampling.max_tokens == 45
    assert request.max_total_tokens == 50
    assert request.spec.sampling.seed is not None
    assert len(request.block_hashes) == 1
    assert admit([1]).spec.sampling.seed != admit([1]).spec.sampling.seed


def test_the_smaller_of_context_and_cache_is_the_limit() -> None:
    assert admit([1], num_blocks=4).max_total_tokens == 16
    with pytest.raises(PromptTooLongError, match=r"the whole KV cache holds 16 tokens.* needs 21: 20 in"):
        admit([1] * 20, num_blocks=4)
    with pytest.raises(PromptTooLongError, match=r"the model's context holds 50 tokens.* needs 61: 60 in"):
        admit([1] * 60, num_blocks=100)


def test_time_spent_before_the_engine_counts_and_a_fast_clock_does_not() -> None:
    early = admit([1], request={"arrival_time": time.time() - 200})
    assert early.arrival == pytest.approx(time.monotonic() - 200, abs=100)
    assert admit([1], request={"arrival_time": time.time() + 600}).arrival == pytest.approx(time.monotonic(), abs=100)


def test_cache_roots_part_the_hash_chains() -> None:
    one, other = (admit([1] * 9, request={"placement": Placement(cache_root=root)}) for root in (b"a", b"b"))
    assert not set(one.block_hashes) & set(other.block_hashes)


def test_an_adapters_digest_is_in_the_hash_chain_whoever_built_the_request() -> None:
    """A name that means other weights by now never meets the old blocks; nothing but the ask says which it is."""
    asks: list[tuple[AdapterAsk, ...]] = [(), (AdapterAsk("a", b"1" * 16),), (AdapterAsk("a", b"2" * 16),)]
    chains = [admit([1] * 9, request={"asks": ask}).block_hashes for ask in asks]
    assert len({tuple(chain) for chain in chains}) == 3
    again = admit([1] * 9, request={"asks": (AdapterAsk("b", b"2" * 16),)})
    assert again.block_hashes == chains[2]
