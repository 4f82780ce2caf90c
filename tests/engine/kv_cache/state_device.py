"""States on the fake device: a row's is what its last computed slot holds, and a copy fills blocks with numbers of it.

Whoever goes on from cached tokens must have been given the state behind just these.
"""

from __future__ import annotations

from typing import Any

from app.records.step import SchedulerOutput
from tests.engine.fake_executor import MASK, DeviceRow
from tests.engine.kv_cache.window_device import WindowDevice


class StateDevice(WindowDevice):
    def __init__(self, *sizes: int, **options: Any) -> None:
        super().__init__(*sizes, **options)
        self.given: dict[int, int] = {}  # row -> the state that was copied there
        self.num_given = 0
        self.begun: set[int] = set()  # occupants

    def copy_states(self, step_message: SchedulerOutput) -> None:
        copies = step_message.state_copies
        if copies is None:
            return
        held = {
            block for row, device in self.rows.items() if row not in step_message.freed_rows for block in device.blocks
        }
        for copy in copies.loads:
            for block in copy.blocks:
                self.finish(block)
            first = int(self.kv[copy.blocks[0], 0])
            found = [int(self.kv[block, 0]) for block in copy.blocks]
            assert found == [first + number & MASK for number in range(len(found))], "a state of which a part is gone"
            self.given[copy.row] = first
            self.num_given += 1
        for copy in copies.stores:
            device = self.rows[copy.row]
            assert held.isdisjoint(copy.blocks), "a state in a request's blocks"
            for number, block in enumerate(copy.blocks):
                self.finish(block)
                self.kv[block] = self.state_at(device, device.num_computed - 1) + number & MASK

    def compute(self, device: DeviceRow, count: int, writers: dict[int, int]) -> None:
        begins = self.info.states is not None and device.occupant not in self.begun
        self.begun.add(device.occupant)
        behind = device.num_computed
        super().compute(device, count, writers)
        if begins and behind:
            row = next(row for row, other in self.rows.items() if other is device)
            assert self.given.pop(row, None) == self.state_at(device, behind - 1), "another prefix's state"
