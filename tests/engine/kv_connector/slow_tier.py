"""The fake device with a host pool whose loads take several step messages, to test what the scheduler makes of that.

It keeps a worker's promise and no more: a load is done when its time is up, or when a step computes in a row that has
its block. Until then the block holds rubbish. Whatever a request reads that it did not compute is checked.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np

from app.config.engine import EngineConfig
from app.engine.core import EngineCore
from app.records.host_pool import HostPoolReport, KVTransfers
from app.records.step import ModelRunnerOutput, SchedulerOutput
from tests.engine.core_driver import KEY, fake_info
from tests.engine.fake_executor import DeviceRow, FakeExecutor, chain

RUBBISH = -7


class SlowTier(FakeExecutor):
    def __init__(
        self, num_blocks: int, num_slots: int, block_size: int, *, late: bool, delay: int, seed: int, **drafts: Any
    ) -> None:
        super().__init__(num_blocks, block_size, late=late, **drafts)
        self.info = replace(self.info, kv_connector=(HostPoolReport(num_slots, 8),) if num_slots else ())
        self.host = np.full((num_slots, block_size), RUBBISH, np.int64)
        self.delay = delay
        self.rng = random.Random(seed)
        self.loads: dict[int, tuple[int, int, Any]] = {}  # block -> (step, step messages left, content)
        self.num_loaded = 0
        self.waits_beside_others = 0  # steps that waited for a load although other rows had tokens in them
        self.checked: set[int] = set()  # occupants

    def execute(self, step_message: SchedulerOutput) -> ModelRunnerOutput:
        for block, (step, left, content) in list(self.loads.items()):
            if left == 0:
                self.finish(block)
            else:
                self.loads[block] = (step, left - 1, content)
        if step_message.transfers is not None:
            self.copy(step_message.step_id, step_message.transfers)
        self.copy_states(step_message)
        self.alone = len(step_message.rows) == 1
        output = super().execute(step_message)
        output.loading_since = min((step for step, _, _ in self.loads.values()), default=0)
        return output

    def copy(self, step_id: int, transfers: KVTransfers) -> None:
        stores = self.kv[transfers.store_blocks]
        assert (stores >= 0).all(), "stores what nobody computed"
        assert self.loads.keys().isdisjoint(transfers.store_blocks.tolist()), "stores what is being loaded"
        self.host[transfers.store_slots] = stores
        for slot, block in zip(transfers.load_slots.tolist(), transfers.load_blocks.tolist(), strict=True):
            self.finish(block)
            self.loads[block] = (step_id, self.rng.randint(0, self.delay), self.host[slot].copy())
            self.kv[block] = RUBBISH
            self.num_loaded += 1

    def copy_states(self, step_message: SchedulerOutput) -> None:
        """Nothing keeps states here."""

    def finish(self, block: int) -> None:
        if block in self.loads:
            self.kv[block] = self.loads.pop(block)[2]

    def compute(self, device: DeviceRow, count: int, writers: dict[int, int]) -> None:
        under_way = [block for block in device.blocks if block in self.loads]
        self.waits_beside_others += bool(under_way) and not self.alone
        for block in under_way:
            self.finish(block)
        if device.occupant not in self.checked:
            self.checked.add(device.occupant)
            state = 0
            for position in range(device.num_computed):
                state = chain(state, device.token_ids[position])
                held = self.kv[device.blocks[position // self.block_size], position % self.block_size]
                assert held == state, f"position {position} holds another prefix"
        super().compute(device, count, writers)


def slow_core(
    *,
    num_blocks: int = 64,
    num_slots: int = 256,
    block_size: int = 4,
    late: bool = False,
    delay: int = 4,
    seed: int = 0,
    sink: Any = None,
    **options: Any,
) -> tuple[EngineCore, SlowTier]:
    """A started core over it; `options` are EngineConfig's."""
    config = EngineConfig(block_size=block_size, **options)
    device = SlowTier(num_blocks, num_slots, block_size, late=late, delay=delay, seed=seed)
    core = EngineCore(config, fake_info(), device, KEY, kv_event_sink=sink)
    core.start()
    return core, device
