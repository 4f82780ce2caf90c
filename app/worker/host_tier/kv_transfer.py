"""Copies of KV blocks between the device and the host pool, as the step messages ask for them.

A block lies in L places on the device (one for each layer) and in one on the host, so it goes through a staging
buffer: one kernel a layer gathers or scatters a whole group of blocks, and runs of neighbouring slots cross the link
in one copy. Three streams work beside each other: the steps, stores on their way out, loads on their way in.

What keeps the contents right, whatever the streams' speeds (I2):
- a store is gathered after all earlier steps, and before this step message's step or loads overwrite the block;
- a load is written after all earlier steps and after the gathering of what its blocks held;
- a load reads a slot after the store to it, and a store overwrites a slot after the loads from it;
- the first step with a row, or before which its states are copied out of blocks, waits for every load into these
  blocks: its own, and those of an earlier holder who left before they were done.
So the steps wait for nothing but the gathering of what they overwrite, and rows that use what is loaded.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from app.platforms import platform_of
from app.platforms.to_device import to_device
from app.records.host_pool import KVTransfers
from app.records.step import SchedulerOutput
from app.worker.host_tier.host_pool import HostPool
from app.worker.host_tier.streams import Event, Stream

STORE_STAGING_BYTES = 256 << 20
LOAD_STAGING_BYTES = 256 << 20


class KVTransfer:
    """Called with each step message before its step."""

    def __init__(self, caches: list[torch.Tensor], pool: HostPool) -> None:
        """`caches` [B, ...] of each layer; the pool is closed with this."""
        self._caches = [cache.view(len(cache), -1).view(pool.blocks.dtype) for cache in caches]
        self._host = pool
        self._pool, self._layers = pool.blocks, pool.layers

    def execute(self, step_message: SchedulerOutput) -> None:
        """Copy at once: on a CPU there is nothing to run beside."""
        transfers = step_message.transfers
        if transfers is None:
            return
        for blocks, slots, is_load in (
            (transfers.store_blocks, transfers.store_slots, False),
            (transfers.load_blocks, transfers.load_slots, True),
        ):
            if not len(blocks):
                continue
            at_block, at_slot = torch.from_numpy(blocks.astype(np.int64)), torch.from_numpy(slots.astype(np.int64))
            for part, cache in zip(self._layers, self._caches, strict=True):
                if is_load:
                    cache[at_block] = self._pool[at_slot, part]
                else:
                    self._pool[at_slot, part] = cache[at_block]

    def loading_since(self) -> int:
        """The oldest step message whose loads are under way; 0: none is."""
        return 0

    def close(self) -> None:
        """Free the pool, once nothing is under way any more."""
        self._host.close()


@dataclass(slots=True, frozen=True)
class _Copy:
    """Something a stream is doing: with which device blocks and host slots, and where it ends."""

    step_id: int
    done: Event
    blocks: frozenset[int]
    slots: frozenset[int]


class Staging:
    """The buffers [n, E] on the device; made before the KV cache is sized, so that their memory is counted."""

    def __init__(self, elements: int, most: int, dtype: torch.dtype, device: torch.device) -> None:
        """`most` blocks of `elements` are all that a buffer can ever use at once."""
        block_bytes = elements * dtype.itemsize

        def buffer(limit: int) -> torch.Tensor:
            return torch.empty(max(1, min(most, limit // block_bytes)), elements, dtype=dtype, device=device)

        self.stores = buffer(STORE_STAGING_BYTES)
        self.loads = buffer(LOAD_STAGING_BYTES)


class BackgroundTransfer(KVTransfer):
    """Copies beside the steps, over streams; the head of this file says what waits for what."""

    def __init__(
        self,
        caches: list[torch.Tensor],
        pool: HostPool,
        staging: Staging,
        steps: Stream,
        outward: Stream,
        inward: Stream,
    ) -> None:
        super().__init__(caches, pool)
        self._staging = staging
        self._steps = steps
        self._outward = outward
        self._inward = inward
        self._gathered: deque[_Copy] = deque()  # stores' reads of device blocks
        self._stores: deque[_Copy] = deque()  # their writes of host slots
        self._loads: deque[_Copy] = deque()
        self._waits: dict[int, list[Event]] = {}  # row -> loads that its first step waits for

    def execute(self, step_message: SchedulerOutput) -> None:
        """Enqueue the step message's copies, and make its step wait for what it needs."""
        for copies in (self._gathered, self._stores, self._loads):
            while copies and copies[0].done.is_done():
                copies.popleft()
        if step_message.transfers is not None:
            before = self._steps.record_event()
            self._store(step_message.step_id, step_message.transfers, before)
            self._load(step_message.step_id, step_message.transfers, before)
        if self._loads or self._waits:
            self._guard_rows(step_message)

    def loading_since(self) -> int:
        """The oldest step message whose loads are under way; 0: none is."""
        return next((copy.step_id for copy in self._loads if not copy.done.is_done()), 0)

    def close(self) -> None:
        """Free the pool, once nothing is under way any more."""
        device = self._caches[0].device
        if (runtime := platform_of(device).runtime) is not None:
            runtime.synchronize(device)
        super().close()

    def _store(self, step_id: int, transfers: KVTransfers, before: Event) -> None:
        if not len(transfers.store_blocks):
            return
        order, num_urgent = _store_order(transfers)
        self._outward.wait(before)
        size = len(self._staging.stores)
        for start in range(0, len(order), size):
            group = order[start : start + size]
            group = group[np.argsort(transfers.store_slots[group])]
            blocks, slots = transfers.store_blocks[group], transfers.store_slots[group]
            self._outward.run(partial(self._gather, blocks))
            gathered = self._outward.record_event()
            if start < num_urgent:
                self._steps.wait(gathered)
            self._gathered.append(_Copy(step_id, gathered, frozenset(blocks.tolist()), frozenset()))
            touched = frozenset(slots.tolist())
            _wait_for(self._outward, (load for load in self._loads if not load.slots.isdisjoint(touched)))
            self._outward.run(partial(self._copy_out, slots))
            self._stores.append(_Copy(step_id, self._outward.record_event(), frozenset(), touched))

    def _load(self, step_id: int, transfers: KVTransfers, before: Event) -> None:
        if not len(transfers.load_blocks):
            return
        order = _load_order(transfers)
        self._inward.wait(before)
        size = len(self._staging.loads)
        for start in range(0, len(order), size):
            group = order[start : start + size]
            blocks, slots = transfers.load_blocks[group], transfers.load_slots[group]
            into, touched = frozenset(blocks.tolist()), frozenset(slots.tolist())
            _wait_for(self._inward, (store for store in self._stores if not store.slots.isdisjoint(touched)))
            self._inward.run(partial(self._copy_in, slots))
            _wait_for(self._inward, (store for store in self._gathered if not store.blocks.isdisjoint(into)))
            self._inward.run(partial(self._scatter, blocks))
            self._loads.append(_Copy(step_id, self._inward.record_event(), into, touched))

    def _guard_rows(self, step_message: SchedulerOutput) -> None:
        for row in step_message.freed_rows:
            self._waits.pop(row, None)
        entered = [(request.row, request.block_ids) for request in step_message.new_requests]
        copied = [] if step_message.state_copies is None else step_message.state_copies.loads
        states = [(copy.row, copy.blocks) for copy in copied]
        for row, block_ids in [*entered, *step_message.new_blocks, *states]:
            marks = [copy.done for copy in self._loads if not copy.blocks.isdisjoint(block_ids)]
            if marks:
                self._waits.setdefault(row, []).extend(marks)
        if self._waits:
            for row in [*step_message.rows.tolist(), *(row for row, _ in states)]:
                for event in self._waits.pop(row, ()):
                    self._steps.wait(event)

    # ---- what the streams do

    def _gather(self, blocks: NDArray[np.int32]) -> None:
        index = to_device(blocks.astype(np.int64), self._caches[0].device)
        for part, cache in zip(self._layers, self._caches, strict=True):
            self._staging.stores[: len(blocks), part].copy_(cache.index_select(0, index))

    def _scatter(self, blocks: NDArray[np.int32]) -> None:
        index = to_device(blocks.astype(np.int64), self._caches[0].device)
        for part, cache in zip(self._layers, self._caches, strict=True):
            cache.index_copy_(0, index, self._staging.loads[: len(blocks), part])

    def _copy_out(self, slots: NDArray[np.int32]) -> None:
        for at, slot, count in _runs(slots):
            self._pool[slot : slot + count].copy_(self._staging.stores[at : at + count], non_blocking=True)

    def _copy_in(self, slots: NDArray[np.int32]) -> None:
        for at, slot, count in _runs(slots):
            self._staging.loads[at : at + count].copy_(self._pool[slot : slot + count], non_blocking=True)


def _load_order(transfers: KVTransfers) -> NDArray[np.intp]:
    """Order by slots, so that runs are long: a prompt's blocks were evicted from its end on and lie there backwards."""
    return np.argsort(transfers.load_slots, kind="stable")


def _store_order(transfers: KVTransfers) -> tuple[NDArray[np.intp], int]:
    """First the blocks that the step may write, whose number comes with the order; then those to be loaded into, in the
    order of the loads, which so begin while later blocks are still on their way out."""
    place = {block: i for i, block in enumerate(transfers.load_blocks[_load_order(transfers)].tolist())}
    places = np.array([place.get(block, -1) for block in transfers.store_blocks.tolist()], np.int64)
    return np.argsort(places, kind="stable"), int((places < 0).sum())


def _wait_for(stream: Stream, copies: Iterable[_Copy]) -> None:
    for copy in copies:
        stream.wait(copy.done)


def _runs(slots: NDArray[np.int32]) -> list[tuple[int, int, int]]:
    """Neighbouring slots in rising order: (index of the first, its slot, count)."""
    edges = np.flatnonzero(np.diff(slots) != 1) + 1
    starts = [0, *edges.tolist()]
    return [(at, int(slots[at]), end - at) for at, end in zip(starts, [*starts[1:], len(slots)], strict=True)]
