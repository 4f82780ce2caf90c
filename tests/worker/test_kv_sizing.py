"""How many blocks: the configured number, or what memory and need allow."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from app.config.engine import EngineConfig
from app.errors import ConfigError
from app.layers.cache_spec import LayerCacheSpec
from app.worker.attention.kv_cache import KVCache, KVCacheSpec
from app.worker.kv_sizing import describe, size_kv_cache

SPEC = KVCacheSpec((LayerCacheSpec((2, 2), 80, torch.float32),) * 3, block_size=16)
CPU = torch.device("cpu")


def size(max_model_len: int, **options: Any) -> int:
    def never() -> Any:
        raise AssertionError("nothing is measured on a CPU")

    return size_kv_cache(EngineConfig(**options), SPEC, max_model_len, CPU, never)


def test_bytes_of_a_block_are_those_that_are_allocated() -> None:
    caches = SPEC.allocate(5, CPU)
    assert sum(cache.nbytes for cache in caches) == 5 * SPEC.bytes_per_block
    assert caches[0].shape == (5, 2, 2, 16, 80)
    assert not caches[0].any()
    assert describe(SPEC, 1000, 2048) == [
        "KV cache: 1000 blocks of 16 tokens (59 MiB), room for 7.8 requests of 2048 tokens"
    ]


def test_as_configured_even_if_small() -> None:
    assert size(4096, num_blocks=3) == 3


def test_what_memory_holds() -> None:
    assert size(100, kv_cache_memory_bytes=50 * SPEC.bytes_per_block + 1, max_num_seqs=64) == 50


def test_no_more_than_all_rows_can_fill() -> None:
    assert size(100, max_num_seqs=3) == 3 * 7


def test_one_longest_request_must_fit() -> None:
    assert size(112, kv_cache_memory_bytes=7 * SPEC.bytes_per_block) == 7
    with pytest.raises(ConfigError, match=r"holds 96 tokens, less than one request of max_model_len=112: raise kv_c"):
        size(112, kv_cache_memory_bytes=7 * SPEC.bytes_per_block - 1)


def test_layers_of_several_groups_share_their_places_in_a_block() -> None:
    full = LayerCacheSpec((2, 2), 80, torch.float32)
    sliding = replace(full, sliding_window=8)
    spec = KVCacheSpec((sliding, sliding, full, sliding, sliding, full), 16, (None, 8, 8))
    assert spec.positions == [(1, 0), (2, 0), (0, 0), (1, 1), (2, 1), (0, 1)]
    assert spec.bytes_per_block * 3 == spec.bytes_per_token * 16
    cache = KVCache(spec, CPU)
    cache.allocate(5)
    first, second = cache.places
    assert [tensor is first for tensor in cache.tensors] == [True, True, True, False, False, False]
    assert all(tensor is second for tensor in cache.tensors[3:])
    assert [part.stop - part.start for part in spec.copy_slices()] == [first[0].numel()] * 2
    first.fill_(3)
    cache.free()
    assert cache.is_free
    cache.restore()
    assert [tensor.shape for tensor in cache.tensors] == [(5, 2, 2, 16, 80)] * 6
    assert not any(tensor.any() for tensor in cache.tensors)


def test_a_configured_number_is_memory_of_all_layers() -> None:
    full = LayerCacheSpec((2, 2), 80, torch.float32)
    spec = KVCacheSpec((full, *(replace(full, sliding_window=20),) * 2), 16, (None, 20, 20))
    config = EngineConfig(num_blocks=10)
    assert size_kv_cache(config, spec, 4096, CPU, lambda: 0) == 30
    with pytest.raises(ConfigError, match="num_blocks=1 holds no token in each of the 3 groups"):
        size_kv_cache(EngineConfig(num_blocks=1), spec, 4096, CPU, lambda: 0)
    notes = describe(spec, 30, 160)
    assert notes[1] == "KV cache: room for 1.6 requests of 160 tokens; 1.0 without hybrid_kv_cache"
