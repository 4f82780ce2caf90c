"""What does not go with layers that keep states is refused by the option's name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from app.config.engine import EngineConfig
from app.errors import ConfigError
from app.layers.cache_spec import LayerCacheSpec, LayerStateSpec, StateTensor
from app.worker.attention.kv_cache import KVCache, KVCacheSpec
from app.worker.kv_sizing import describe, num_state_slots, size_kv_cache
from app.worker.state_limits import refuse_with_states

CPU = torch.device("cpu")
STATE = LayerStateSpec((StateTensor((3, 8), torch.float32), StateTensor((2, 4, 4), torch.float32)))
SPEC = KVCacheSpec((LayerCacheSpec((2, 2), 80, torch.float32),), 16, states=(STATE, None, STATE))


def test_a_host_tier_is_refused_where_there_are_no_blocks() -> None:
    config = EngineConfig(kv_host_memory_bytes=1 << 20)
    refuse_with_states(config, SPEC)
    with pytest.raises(ConfigError, match=r"^kv_host_memory_bytes.*recurrent states") as caught:
        refuse_with_states(config, KVCacheSpec((), 16, states=(STATE,)))
    assert caught.value.param == "kv_host_memory_bytes"


def test_a_draft_model_is_refused_where_it_or_its_target_keeps_states() -> None:
    config = EngineConfig(speculative_config={"method": "draft_model", "model": "tiny-chat-draft"})
    refuse_with_states(config, KVCacheSpec(SPEC.layers, 16))
    with pytest.raises(ConfigError, match=r"^speculative_config: .*draft model, keep.*method\s+draft_model"):
        refuse_with_states(config, SPEC)


def test_a_type_of_states_is_refused_where_no_layer_has_it() -> None:
    config = EngineConfig(recurrent_state_dtype="bfloat16")
    for spec in (SPEC, KVCacheSpec(SPEC.layers, 16)):
        with pytest.raises(
            ConfigError, match=r"^recurrent_state_dtype=bfloat16: .* keep no recurrent states"
        ) as caught:
            refuse_with_states(config, spec)
        assert caught.value.param == "recurrent_state_dtype"
    refuse_with_states(EngineConfig(recurrent_state_dtype="float32"), SPEC)


def test_each_layer_finds_its_own() -> None:
    cache = KVCache(SPEC, CPU, num_rows=5)
    cache.allocate(7)
    assert [len(states) for states in cache.states] == [2, 0, 2]
    assert [tensor.numel() > 0 for tensor in cache.tensors] == [False, True, False]
    assert cache.tensors[1] is cache.places[0]
    assert cache.states[0][1].shape == (5, 2, 4, 4)
    assert sum(tensor.nbytes for states in cache.states for tensor in states) == 5 * SPEC.bytes_per_state
    cache.free()
    assert cache.is_free
    cache.restore()
    assert not cache.states[2][0].any()


def test_states_and_blocks_come_out_of_one_budget() -> None:
    def never() -> Any:
        raise AssertionError("nothing is measured on a CPU")

    def size(num_bytes: int) -> int:
        config = EngineConfig(kv_cache_memory_bytes=num_bytes, max_num_seqs=3)
        return size_kv_cache(config, SPEC, 64, CPU, never)

    assert size(3 * SPEC.bytes_per_state + 5 * SPEC.bytes_per_block) == 5
    with pytest.raises(ConfigError, match=r"beside 3 requests' states \(max_num_seqs\)"):
        size(2 * SPEC.bytes_per_state + 4 * SPEC.bytes_per_block)


def test_a_start_says_what_a_state_costs() -> None:
    first, second = describe(SPEC, 10, 64, num_rows=4096)
    (kept, _) = describe(SPEC, 10, 64, num_rows=4096, num_slots=None)
    each = SPEC.blocks_per_state
    assert kept.endswith(f"one is kept in {each} blocks, at most {10 // each} beside no tokens")
    assert first.startswith("states: 0.00 MiB a request, as 0 tokens; 4096 requests at once (max_num_seqs), 1.8 MiB; ")
    assert first.endswith("none are kept, so prefixes are not cached")
    assert second.startswith("KV cache: 10 blocks")
    (alone,) = describe(KVCacheSpec((), 16, states=(STATE,)), 10, 64, num_rows=2)
    assert alone.startswith("states:")


def test_states_that_the_device_cannot_hold_are_an_error_of_the_option() -> None:
    huge = KVCacheSpec((), 16, states=(LayerStateSpec((StateTensor((1 << 20, 1 << 20), torch.float32),)),))
    with pytest.raises(ConfigError, match=r"^max_num_seqs=64: the states of so many requests need"):
        KVCache(huge, CPU, num_rows=64)


def test_encoded_inputs_that_the_device_cannot_hold_are_an_error_of_the_option() -> None:
    huge = LayerCacheSpec((2, 1 << 20), 1 << 20, torch.float32, encoder_positions=1 << 20)
    with pytest.raises(ConfigError, match=r"^max_num_seqs: what 64 requests keep of encoded inputs needs"):
        KVCache(KVCacheSpec((), 16, encoded=(huge,)), CPU, num_encoded=64)


def test_copies_of_states_lie_in_blocks_or_where_there_are_none_in_slots() -> None:
    def slots(spec: KVCacheSpec, **options: Any) -> int | None:
        return num_state_slots(EngineConfig(**{"max_num_seqs": 3, **options}), spec, CPU, lambda: 0)

    alone = KVCacheSpec((), 16, states=(STATE,))
    assert (slots(SPEC), slots(alone), slots(replace(SPEC, states=()))) == (None, 6, 0)
    assert slots(SPEC, enable_prefix_caching=False) == slots(alone, enable_prefix_caching=False) == 0
    assert (SPEC.blocks_per_state - 1) * SPEC.bytes_per_block < SPEC.bytes_per_state
    assert SPEC.blocks_per_state * SPEC.bytes_per_block >= SPEC.bytes_per_state
