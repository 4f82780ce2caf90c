"""Numbered batches and snapshots of a prefix cache, against a plain set and against a real block pool."""

from __future__ import annotations

import random

import msgspec

from app.engine.kv_cache.block_pool import BlockPool
from app.records.kv_events import KVEventBatch, KVEventLog, KVTier
from tests.engine.core_driver import make_core, make_request, run


def name(i: int) -> bytes:
    return i.to_bytes(16, "little")


def replay(state: dict[KVTier, set[bytes]], batch: KVEventBatch) -> None:
    """What a listener makes of a batch: plain sets."""
    if batch.is_snapshot:
        for cached in state.values():
            cached.clear()
    for event in batch.events:
        if event.kind == "stored":
            state[event.tier].update(event.split())
        else:
            assert state[event.tier].issuperset(event.split()), "a removal of what was never announced"
            state[event.tier].difference_update(event.split())


def test_batches_are_numbered_and_net() -> None:
    log = KVEventLog("r", "1")
    assert log.flush() is None
    log.report_stored(b"", [name(1), name(2)])
    log.report_removed([name(2)])
    log.report_stored(b"", [name(3)], "host")
    first = log.flush()
    assert first is not None
    assert first.sequence == 0
    assert [(e.kind, e.tier, e.split()) for e in first.events] == [
        ("stored", "device", [name(1)]),
        ("stored", "host", [name(3)]),
    ]
    log.report_removed([name(1)])
    log.report_stored(b"", [name(1)])
    assert log.flush() is None  # nothing has changed in the end
    log.report_removed([name(1)])
    log.report_stored(b"", [name(4)])
    second = log.flush()
    assert second is not None
    assert (second.sequence, [event.kind for event in second.events]) == (1, ["removed", "stored"])
    snapshot = log.snapshot()
    assert (snapshot.sequence, snapshot.is_snapshot) == (1, True)
    assert {event.tier: set(event.split()) for event in snapshot.events} == {"device": {name(4)}, "host": {name(3)}}


def test_batches_survive_the_wire() -> None:
    log = KVEventLog("r", "1")
    log.report_stored(b"", [name(1)])
    batch = log.flush()
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(batch), type=KVEventBatch) == batch


def test_any_history_adds_up_to_the_truth() -> None:
    rng = random.Random(1)
    log = KVEventLog("r", "1")
    truth: dict[KVTier, set[bytes]] = {"device": set(), "host": set()}
    heard: dict[KVTier, set[bytes]] = {"device": set(), "host": set()}
    for _ in range(4000):
        tier: KVTier = rng.choice(("device", "host"))
        hashes = [name(rng.randrange(60)) for _ in range(rng.randrange(1, 6))]
        if rng.random() < 0.5:
            log.report_stored(b"", hashes, tier)
            truth[tier].update(hashes)
        else:
            log.report_removed(hashes, tier)
            truth[tier].difference_update(hashes)
        if rng.random() < 0.2 and (batch := log.flush()) is not None:
            replay(heard, batch)
            assert heard == truth
    log.flush()
    replay(heard, log.snapshot())
    assert heard == truth


def test_a_pool_under_pressure_is_mirrored() -> None:
    """Requests through a whole engine whose cache is far too small: what was announced is what can be found."""
    log = KVEventLog("r", "1")
    core = make_core(num_blocks=24, block_size=4, max_num_batched_tokens=64, sink=log)
    heard: dict[KVTier, set[bytes]] = {"device": set(), "host": set()}
    rng = random.Random(2)
    prefixes = [[rng.randrange(50) for _ in range(16)] for _ in range(6)]
    pool: BlockPool = core.scheduler.kv.pool
    num_batches = 0

    def listen(step: int) -> None:
        nonlocal num_batches
        if (batch := log.flush()) is not None:
            num_batches += 1
            replay(heard, batch)
            assert heard["device"] == set(pool._by_hash)

    requests = [
        make_request(f"r{i}", rng.choice(prefixes) + [rng.randrange(50) for _ in range(rng.randrange(1, 12))])
        for i in range(60)
    ]
    run(core, requests, each_step=listen)
    listen(0)
    assert num_batches > 20
    assert heard["device"] == set(pool._by_hash)
