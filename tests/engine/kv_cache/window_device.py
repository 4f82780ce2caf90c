"""The fake device for layers in groups: a brute-force model of what each group must find in the blocks of its table.

Every slot that a step may read must hold what the request's own tokens make there; what has left a window may hold
anything, and `poison` makes it rubbish as soon as no request holds it, no hash finds it and no store is to read it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from app.engine.kv_cache.kv_cache_manager import KVCacheManager
from app.engine.kv_connector.host_memory import HostMemory
from app.records.kv_groups import WHOLE, Windows
from tests.engine.fake_executor import DeviceRow, chain
from tests.engine.kv_connector.slow_tier import RUBBISH, SlowTier


class WindowDevice(SlowTier):
    """With `windows` of one group without a window the same as SlowTier."""

    def __init__(self, *sizes: int, windows: Windows = WHOLE, **options: Any) -> None:
        super().__init__(*sizes, **options)
        self.windows = windows
        self.info = replace(self.info, kv_windows=windows)
        self.states: dict[int, list[int]] = {}  # occupant -> what its tokens make, position by position

    def poison(self, kv: KVCacheManager) -> None:
        """What the next step message has to take to the host stays until then, though its block is blank again: as
        when a request took it, and was preempted before there was a step."""
        stored = kv.connector._stores.values() if isinstance(kv.connector, HostMemory) else ()
        self.kv[list(set(kv.pool._blank).difference(stored))] = RUBBISH

    def compute(self, device: DeviceRow, count: int, writers: dict[int, int]) -> None:
        if self.windows == WHOLE:
            super().compute(device, count, writers)
            return
        for block in device.blocks:
            self.finish(block)
        start, end = device.num_computed, device.num_computed + count
        states = self.states.setdefault(device.occupant, [])
        del states[start:]  # of drafts that were rejected
        for token in (device.token_ids + device.drafts)[len(states) : end]:
            states.append(chain(states[-1] if states else 0, token))
        assert len(states) == end, "computes a token that does not exist"
        for group, window in enumerate(self.windows):
            table = np.array(device.blocks[group :: len(self.windows)])
            positions = np.arange(0 if window is None else max(0, start - window + 1), end)
            blocks, offsets = table[positions // self.block_size], positions % self.block_size
            wanted = np.array([chain(states[position], group) for position in positions.tolist()])
            is_old = positions < start
            assert (self.kv[blocks, offsets] == wanted)[is_old].all(), (
                f"group {group} lost what it sees from {start} on"
            )
            for block in set(blocks[~is_old].tolist()):
                assert block != 0, "writes the block that nobody holds"
                assert writers.setdefault(block, device.occupant) == device.occupant, "two requests write one block"
                for out in self.unreturned.values():
                    assert out.get(block, device.occupant) == device.occupant, "block handed out while a step is out"
            self.kv[blocks[~is_old], offsets[~is_old]] = wanted[~is_old]
            assert (self.kv[blocks, offsets] == wanted).all(), f"group {group} has a block twice in what it sees"
        device.num_computed = end

    def state_at(self, device: DeviceRow, position: int) -> int:
        if self.windows == WHOLE:
            return super().state_at(device, position)
        return self.states[device.occupant][position]
