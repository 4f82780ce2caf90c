"""What watched blocks tell of the cache, with a clock of the test's own and every block watched."""

from __future__ import annotations

from app.engine.kv_cache.block_pool import BlockPool
from app.records.block_residency import BlockResidency


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_block_s_life() -> None:
    """Handed out, cached, hit twice, evicted: as vLLM's metrics define the three spans."""
    clock, pool = Clock(), BlockPool(2)
    pool.residency = BlockResidency(2, clock, every=1)
    (block,) = pool.take(1)
    pool.register(b"", [block], [b"a"])
    pool.free([block])
    for wait_s in (3.0, 4.0):
        clock.now += wait_s
        pool.touch([block])
        pool.free([block])
    clock.now += 5.0
    pool.take(2)  # the other one is blank
    assert pool.residency.take_samples() == {"lifetime_s": [12.0], "idle_s": [5.0], "reuse_gap_s": [3.0, 4.0]}
    assert pool.residency.take_samples() == {}


def test_blocks_that_were_never_cached_are_not_counted() -> None:
    clock, pool = Clock(), BlockPool(1)
    pool.residency = BlockResidency(1, clock, every=1)
    for _ in range(3):
        pool.free(pool.take(1))
    assert pool.residency.take_samples() == {}


def test_one_block_in_many_is_watched() -> None:
    residency = BlockResidency(1000, every=64)
    residency.note_taken(range(1000))
    residency.note_eviction(range(1000))
    samples = residency.take_samples()
    assert len(samples["lifetime_s"]) == len(range(0, 1000, 64))
