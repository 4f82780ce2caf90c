"""How many blocks: the configured number, or what memory and need allow."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from app.config import EngineConfig
from app.engine.attention.kv_cache import KVCacheSpec
from app.engine.layers.cache_spec import LayerCacheSpec
from app.engine.worker.kv_sizing import describe, size_kv_cache
from app.errors import ConfigError

SPEC = KVCacheSpec((LayerCacheSpec((2, 2), 80, torch.float32),) * 3, block_size=16)
CPU = torch.device("cpu")


def size(max_model_len: int, **options: Any) -> int:
    def never() -> Any:
        raise AssertionError("nothing is measured on a CPU")

    return size_kv_cache(EngineConfig(**options), SPEC, max_model_len, CPU, never, never)


def test_bytes_of_a_block_are_those_that_are_allocated() -> None:
    caches = SPEC.allocate(5, CPU)
    assert sum(cache.nbytes for cache in caches) == 5 * SPEC.bytes_per_block
    assert caches[0].shape == (5, 2, 2, 16, 80)
    assert not caches[0].any()
    assert describe(SPEC, 1000) == "KV cache: 1000 blocks of 16 tokens (59 MiB)"


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
