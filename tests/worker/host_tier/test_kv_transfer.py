"""Copies to and from the host pool: directly, and over streams that run as late and as much out of step as they may."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable

import numpy as np
import pytest
import torch

from app.config.engine import EngineConfig
from app.errors import ConfigError
from app.layers.cache_spec import LayerCacheSpec
from app.records.host_pool import KVTransfers
from app.records.request import EngineRequest
from app.records.sampling_params import SamplingParams
from app.records.step import NewRequest, SchedulerOutput
from app.worker.attention.kv_cache import KVCacheSpec
from app.worker.host_tier.host_pool import HostPool
from app.worker.host_tier.host_tier import HostTier, refuse_host_tier
from app.worker.host_tier.kv_transfer import BackgroundTransfer, KVTransfer, Staging
from app.worker.host_tier.streams import Event
from tests.tiny_models import tiny_model
from tests.worker.worker_driver import Driver

CPU = torch.device("cpu")
# Layers of unequal shapes: four KV heads, one latent vector, a small head behind a window.
SPEC = KVCacheSpec(
    (
        LayerCacheSpec((2, 4), 4, torch.float32),
        LayerCacheSpec((), 6, torch.float32),
        LayerCacheSpec((2, 1), 2, torch.float32, sliding_window=4),
    ),
    block_size=2,
)


class LateEvent:
    def __init__(self) -> None:
        self.reached = False

    def is_done(self) -> bool:
        return self.reached


class LateStream:
    """Work waits here until somebody makes the stream go on."""

    def __init__(self) -> None:
        self.queue: deque[Callable[[], None] | LateEvent | tuple[LateEvent]] = deque()

    def run(self, work: Callable[[], None]) -> None:
        self.queue.append(work)

    def record_event(self) -> LateEvent:
        event = LateEvent()
        self.queue.append(event)
        return event

    def wait(self, event: Event) -> None:
        assert isinstance(event, LateEvent)
        self.queue.append((event,))

    def go_on(self) -> bool:
        """Do the next thing; False when there is none, or it has to wait."""
        if not self.queue:
            return False
        head = self.queue[0]
        if isinstance(head, tuple):
            if not head[0].reached:
                return False
        elif isinstance(head, LateEvent):
            head.reached = True
        else:
            head()
        self.queue.popleft()
        return True


def step_message(step_id: int, transfers: KVTransfers | None, rows: list[int] | None = None) -> SchedulerOutput:
    computed = np.array(rows or [], np.int32)
    return SchedulerOutput(
        step_id, computed, np.ones(len(computed), np.int32), np.ones(len(computed), np.bool_), transfers=transfers
    )


def transfers(stores: list[tuple[int, int]], loads: list[tuple[int, int]]) -> KVTransfers:
    """Stores are (block, slot), loads (slot, block)."""
    out, back = np.array(stores, np.int32).reshape(-1, 2), np.array(loads, np.int32).reshape(-1, 2)
    return KVTransfers(out[:, 0], out[:, 1], back[:, 0], back[:, 1])


def caches(num_blocks: int) -> list[torch.Tensor]:
    made = SPEC.allocate(num_blocks, CPU)
    for layer, cache in enumerate(made):
        cache += torch.arange(num_blocks).view(-1, *[1] * (cache.dim() - 1)) + 1000 * layer
    return made


def content(cache: list[torch.Tensor], block: int) -> set[float]:
    """What a block holds in every element of every layer, less the layer's own share: one number if it is whole."""
    return {float(v) - 1000 * layer for layer, tensor in enumerate(cache) for v in tensor[block].flatten()}


def test_a_block_goes_out_and_comes_back_somewhere_else() -> None:
    device = caches(8)
    transfer = KVTransfer(device, HostPool(5 * SPEC.bytes_per_block, SPEC, CPU))
    transfer.execute(step_message(1, transfers([(3, 4), (6, 0)], [])))
    for cache in device:
        cache.fill_(-1)
    transfer.execute(step_message(2, transfers([], [(0, 1), (4, 2)])))
    assert [content(device, block) for block in (1, 2)] == [{6.0}, {3.0}]
    assert transfer.loading_since() == 0


class Device:
    """Plays the scheduler's half: random step messages that keep its promises, and what every read must find."""

    def __init__(self, seed: int, num_blocks: int = 24, num_slots: int = 10) -> None:
        self.rng = random.Random(seed)
        self.steps, self.outward, self.inward = LateStream(), LateStream(), LateStream()
        self.caches = caches(num_blocks)
        self.pool = HostPool(num_slots * SPEC.bytes_per_block, SPEC, CPU)
        staging = Staging(self.pool.blocks.shape[1], num_slots, SPEC.copy_dtype, CPU)
        staging.stores, staging.loads = staging.stores[:3], staging.loads[:2]  # several groups a step message
        self.transfer = BackgroundTransfer(self.caches, self.pool, staging, self.steps, self.outward, self.inward)
        self.block: list[float] = [float(i) for i in range(num_blocks)]  # in the order of the step messages
        self.slot: dict[int, float] = {}
        self.rows: dict[int, list[int]] = {}
        self.unread: set[int] = set()  # loaded, and not published: that takes a step which has read it
        self.next_value = 100.0
        self.num_checked = 0

    def send(self, step_id: int) -> None:
        rng = self.rng
        freed = [row for row in list(self.rows) if rng.random() < 0.35]  # also those that still load
        for row in freed:
            del self.rows[row]
        idle = [b for b in range(len(self.block)) if not any(b in blocks for blocks in self.rows.values())]
        rng.shuffle(idle)
        known = [block for block in idle if block not in self.unread]
        stored = list(zip(known[:7], rng.sample(range(10), 7), strict=False))
        stored = stored[: rng.choice([0, 0, 0, rng.randint(1, 7)])]  # rare, or every load would wait for a store
        for block, slot in stored:
            self.slot[slot] = self.block[block]
        new: list[NewRequest] = []
        loads: list[tuple[int, int]] = []
        free_rows = [row for row in range(4) if row not in self.rows]
        for row in free_rows[: rng.randint(0, 2)]:
            mine, idle = idle[:4], idle[4:]
            if len(mine) < 4:
                break
            slots = rng.sample(sorted(self.slot), min(len(self.slot), rng.randint(0, 3)))
            for slot, block in zip(slots, mine, strict=False):
                loads.append((slot, block))
                self.block[block] = self.slot[slot]
                self.unread.add(block)
            self.rows[row] = mine
            spec = EngineRequest("r", [], SamplingParams(seed=0))
            new.append(NewRequest(row, np.zeros(9, np.int32), 9, 2 * len(slots), mine, spec, ()))
        computed = [row for row in self.rows if rng.random() < 0.4]
        asked = transfers(stored, loads) if stored or loads else None
        sent = step_message(step_id, asked, computed)
        sent.freed_rows, sent.new_requests = freed, new
        self.transfer.execute(sent)
        for row in computed:
            self.step(row)

    def step(self, row: int) -> None:
        """Reads three blocks of the row and overwrites the fourth."""
        *read, written = self.rows[row]
        self.unread.difference_update(self.rows[row])
        expected = [self.block[block] for block in read]
        value, self.next_value = self.next_value, self.next_value + 1
        self.block[written] = value

        def work() -> None:
            assert [content(self.caches, block) for block in read] == [{v} for v in expected]
            for layer, cache in enumerate(self.caches):
                cache[written] = value + 1000 * layer
            self.num_checked += 1

        self.steps.run(work)

    def go_on(self, streams: list[LateStream], times: int) -> None:
        for _ in range(times):
            self.rng.choice(streams).go_on()

    def drain(self) -> None:
        while any(stream.go_on() for stream in (self.steps, self.outward, self.inward)):
            pass
        left = [stream.queue for stream in (self.steps, self.outward, self.inward)]
        assert not any(left), "the streams wait for each other"


@pytest.mark.parametrize("seed", range(6))
def test_every_step_reads_what_the_messages_say(seed: int) -> None:
    """Whichever stream lags: no block is overwritten too early, read too early, or loaded over a later owner's."""
    device = Device(seed)
    streams = [device.steps, device.outward, device.inward]
    for step_id in range(1, 120):
        if step_id % 30 == 1:
            slow = device.rng.choice([[], *([stream] for stream in streams)])
        device.send(step_id)
        device.go_on([stream for stream in streams if stream not in slow], device.rng.randint(0, 40))
        oldest = device.transfer.loading_since()
        assert 0 <= oldest <= step_id
    device.drain()
    assert device.transfer.loading_since() == 0
    assert device.num_checked > 50
    final = [content(device.caches, block) for block in range(len(device.block))]
    assert final == [{value} for value in device.block]


def test_steps_of_other_rows_go_on_while_a_load_is_under_way() -> None:
    device = Device(0)
    device.rows = {0: [0, 1, 2, 3]}
    device.transfer.execute(step_message(1, transfers([(20, 1)], [])))
    device.drain()
    spec = EngineRequest("r", [], SamplingParams(seed=0))
    enter = NewRequest(1, np.zeros(9, np.int32), 9, 2, [20, 21, 22, 23], spec, ())
    loading = step_message(2, transfers([], [(1, 20)]), [0])
    loading.new_requests = [enter]
    device.transfer.execute(loading)
    device.step(0)
    while device.steps.go_on():
        pass
    assert device.num_checked == 1
    assert device.transfer.loading_since() == 2
    device.transfer.execute(step_message(3, None, [1]))
    done = device.steps.record_event()
    while device.steps.go_on():
        pass
    assert not done.reached
    device.drain()
    assert done.reached
    assert device.transfer.loading_since() == 0


@pytest.mark.parametrize(("memory_bytes", "message"), [(10, "holds no block"), (1 << 60, "more than this machine")])
def test_a_pool_that_cannot_be(memory_bytes: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        HostTier(memory_bytes, SPEC, CPU)
    assert caught.value.param == "kv_host_memory_bytes"


def test_where_there_is_no_tier() -> None:
    driver = Driver(str(tiny_model("llama")), num_blocks=8)
    assert driver.info.kv_connector == ()
    with pytest.raises(ConfigError, match="pooling"):
        refuse_host_tier(EngineConfig(kv_host_memory_bytes=1 << 20))
    with pytest.raises(ValueError, match="enable_prefix_caching"):
        EngineConfig(kv_host_memory_bytes=1 << 20, enable_prefix_caching=False)
