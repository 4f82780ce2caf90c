"""States go from slots to rows, then from rows to slots, as a step message says."""

from __future__ import annotations

import numpy as np
import torch

from app.layers.cache_spec import LayerStateSpec, StateTensor
from app.records.step import SchedulerOutput, StateCopies
from app.worker.attention.kv_cache import KVCache, KVCacheSpec
from app.worker.features.state_copies import StateCopier

SPEC = LayerStateSpec((StateTensor((2,), torch.float32), StateTensor((3, 2), torch.bfloat16)))


def message(copies: StateCopies | None) -> SchedulerOutput:
    none = np.zeros(0, np.int32)
    return SchedulerOutput(1, none, none, none.astype(np.bool_), state_copies=copies)


def test_copies_in_their_order() -> None:
    cache = KVCache(KVCacheSpec((), 16, states=(SPEC, None, SPEC)), torch.device("cpu"), num_rows=4)
    cache.keep(3)
    tensors = [(rows, kept) for i in (0, 2) for rows, kept in zip(cache.states[i], cache.kept[i], strict=True)]
    for rows, kept in tensors:
        for number in range(4):
            rows[number] = number
        for number in range(3):
            kept[number] = 10 + number
    copier = StateCopier(cache)
    copier.before(message(None))
    copier.before(message(StateCopies(loads=[(1, 0), (2, 3)], stores=[(2, 1), (0, 0)])))
    for rows, kept in tensors:
        assert [float(row.flatten()[0]) for row in rows] == [11, 1, 2, 12]
        assert [float(slot.flatten()[0]) for slot in kept] == [11, 2, 12], "what was read first is what was left"
    cache.free()
    assert cache.is_free
