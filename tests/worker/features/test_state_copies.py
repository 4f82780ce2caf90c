"""States go from where they are kept to rows, then from rows to where they are kept, as a step message says."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from app.layers.cache_spec import LayerCacheSpec, LayerStateSpec, StateTensor
from app.records.step import SchedulerOutput, StateCopies, StateCopy
from app.worker.attention.kv_cache import KVCache, KVCacheSpec
from app.worker.features.state_copies import StateCopier

STATE = LayerStateSpec((StateTensor((2,), torch.float32), StateTensor((3, 22), torch.bfloat16)))
CPU = torch.device("cpu")


def message(copies: StateCopies | None) -> SchedulerOutput:
    none = np.zeros(0, np.int32)
    return SchedulerOutput(1, none, none, none.astype(np.bool_), state_copies=copies)


def firsts(tensor: torch.Tensor) -> list[float]:
    return [float(row.flatten()[0]) for row in tensor]


def test_slots_in_their_order() -> None:
    cache = KVCache(KVCacheSpec((), 16, states=(STATE, None, STATE)), CPU, num_rows=4)
    cache.keep(3)
    tensors = [(rows, kept) for i in (0, 2) for rows, kept in zip(cache.states[i], cache.kept[i], strict=True)]
    for rows, kept in tensors:
        for number in range(4):
            rows[number] = number
        for number in range(3):
            kept[number] = 10 + number
    copier = StateCopier(cache, in_blocks=True)
    copier.connect(cache.places)
    copier.before(message(None))
    loads, stores = ((1, 0), (2, 3)), ((0, 1), (2, 0))
    copies = [[StateCopy(row, slot, []) for slot, row in loads], [StateCopy(row, slot, []) for slot, row in stores]]
    copier.before(message(StateCopies(*copies)))
    for rows, kept in tensors:
        assert firsts(rows) == [11, 1, 2, 12]
        assert firsts(kept) == [1, 11, 11], "what was read first is what was left"
    cache.free()
    assert cache.is_free


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn])
def test_a_state_comes_out_of_blocks_as_it_went_in(dtype: torch.dtype) -> None:
    """Bits, whatever the cache's type; blocks of others stay, and a rank takes as many as it needs."""
    layers = (LayerCacheSpec((2, 1), 2, dtype), LayerCacheSpec((), 5, torch.float32))
    cache = KVCache(KVCacheSpec(layers, 2, states=(STATE, None, STATE, None)), CPU, num_rows=3)
    cache.allocate(9)
    cache.keep(None)
    copier = StateCopier(cache, in_blocks=True)
    copier.connect(cache.places)
    rows = [tensor for layer in cache.states for tensor in layer]
    for tensor in rows:
        tensor.copy_(torch.randn(tensor.shape))
        tensor[1].view(-1)[0] = float("nan")
    before = [tensor.clone() for tensor in rows]
    needed = cache.spec.blocks_per_state
    blocks = [7, 2, 5, 0, 8, 3, 1, 6][: needed + 1]
    assert 1 < needed < len(blocks)
    copier.before(message(StateCopies([], [StateCopy(1, -1, blocks)])))
    others = [block for block in range(9) if block not in blocks[:needed]]
    for place in cache.places:
        assert not place[others].view(torch.uint8).any()
    copier.before(message(StateCopies([StateCopy(2, -1, blocks)], [])))
    for tensor, old in zip(rows, before, strict=True):
        assert torch.equal(tensor[[0, 1]].view(torch.uint8), old[[0, 1]].view(torch.uint8))
        assert torch.equal(tensor[2].view(torch.uint8), old[1].view(torch.uint8))
