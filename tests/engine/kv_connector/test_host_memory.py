"""The account of the host tier, against devices whose blocks hold the hashes that they are known by."""

from __future__ import annotations

import random

import pytest

from app.engine.kv_cache.block_pool import BlockPool
from app.engine.kv_connector.host_memory import HostMemory
from app.records.kv_events import KVEventLog, KVTier


def name(number: int) -> bytes:
    return number.to_bytes(16, "little")


class Copies:
    """Executes step messages: what each block and slot holds."""

    def __init__(self, num_blocks: int, num_slots: int) -> None:
        self.device: list[bytes | None] = [None] * num_blocks
        self.host: list[bytes | None] = [None] * num_slots
        self.loaded: dict[int, bytes | None] = {}

    def execute(self, tier: HostMemory) -> None:
        transfers = tier.take_transfers()
        if transfers is None:
            return
        assert len(set(transfers.store_slots.tolist())) == len(transfers.store_slots)
        stores = [self.device[block] for block in transfers.store_blocks.tolist()]
        for slot, content in zip(transfers.store_slots.tolist(), stores, strict=True):
            assert content is not None, "stores a block that holds nothing"
            self.host[slot] = content
        for slot, block in zip(transfers.load_slots.tolist(), transfers.load_blocks.tolist(), strict=True):
            self.device[block] = self.loaded[block] = self.host[slot]


def evict(tier: HostMemory, copies: Copies, numbers: list[int]) -> None:
    blocks = list(range(len(numbers)))
    for block, number in zip(blocks, numbers, strict=True):
        copies.device[block] = name(number)
    tier.take_evicted([name(number) for number in numbers], blocks)


def test_what_was_evicted_comes_back() -> None:
    tier, copies = HostMemory(4), Copies(8, 4)
    evict(tier, copies, [1, 2, 3])
    assert tier.match([name(1), name(3), name(9), name(2)]) == 2
    assert tier.match([name(9)]) == 0
    copies.execute(tier)
    tier.hold([name(1), name(2)])
    tier.load([name(1), name(2)], [6, 7])
    copies.execute(tier)
    assert copies.loaded == {6: name(1), 7: name(2)}
    assert tier.take_transfers() is None


def test_a_step_may_load_what_it_stores() -> None:
    tier, copies = HostMemory(4), Copies(8, 4)
    evict(tier, copies, [1])
    tier.hold([name(1)])
    tier.load([name(1)], [5])
    copies.execute(tier)
    assert copies.loaded == {5: name(1)}


def test_the_least_recently_used_goes_first_and_the_pool_stays_bounded() -> None:
    tier, copies = HostMemory(3), Copies(8, 3)
    evict(tier, copies, [1, 2, 3])
    copies.execute(tier)
    tier.hold([name(1)])
    tier.load([name(1)], [4])
    copies.execute(tier)
    evict(tier, copies, [4])
    assert [tier.match([name(n)]) for n in (1, 2, 3, 4)] == [1, 0, 1, 1]
    tier.check()


def test_what_is_held_is_not_given_up() -> None:
    tier, copies = HostMemory(2), Copies(8, 2)
    evict(tier, copies, [1, 2])
    copies.execute(tier)
    tier.hold([name(1), name(2)])
    evict(tier, copies, [3, 4])  # no room: these are forgotten
    tier.load([name(1), name(2)], [6, 7])
    assert tier.match([name(3)]) == 0
    copies.execute(tier)
    assert copies.loaded == {6: name(1), 7: name(2)}


def test_more_evictions_at_once_than_slots_keep_the_last() -> None:
    log = KVEventLog("r", "1")
    tier, copies = HostMemory(2, 64, log), Copies(8, 2)
    evict(tier, copies, [1, 2, 3, 4, 5])
    copies.execute(tier)
    assert [tier.match([name(n)]) for n in (1, 2, 3, 4, 5)] == [0, 0, 0, 1, 1]
    (event,) = log.flush().events  # type: ignore[union-attr]
    assert (event.kind, event.tier, set(event.split())) == ("stored", "host", {name(4), name(5)})
    figures = tier.figures()
    assert (figures["kv_host_stored_bytes"], tier.num_cached, figures["kv_host_usage"]) == (2 * 64, 2, 1.0)


def test_a_block_that_came_back_is_evicted_without_a_copy() -> None:
    tier, copies = HostMemory(2), Copies(8, 2)
    evict(tier, copies, [1, 2])
    copies.execute(tier)
    evict(tier, copies, [1])
    assert tier.take_transfers() is None
    evict(tier, copies, [3])
    assert [tier.match([name(n)]) for n in (1, 2, 3)] == [1, 0, 1]


class Mirror:
    """Both tiers, rebuilt from the events alone."""

    def __init__(self) -> None:
        self.cached: dict[KVTier, set[bytes]] = {"device": set(), "host": set()}

    def report_stored(self, parent: bytes, hashes: list[bytes], tier: KVTier = "device") -> None:
        assert hashes
        assert self.cached[tier].isdisjoint(hashes), "stored twice"
        self.cached[tier].update(hashes)

    def report_removed(self, hashes: list[bytes], tier: KVTier = "device") -> None:
        assert self.cached[tier].issuperset(hashes), "removed what was not there"
        self.cached[tier].difference_update(hashes)


@pytest.mark.parametrize("seed", range(6))
def test_random_operations_never_serve_stale_content(seed: int) -> None:
    """Chains of random prompts over pools far too small; step messages hold any number of admissions."""
    rng = random.Random(seed)
    mirror = Mirror()
    num_blocks, num_slots = rng.randint(12, 24), rng.randint(3, 40)
    tier = HostMemory(num_slots, 1, mirror)
    pool = BlockPool(num_blocks, mirror, tier.take_evicted)
    copies = Copies(num_blocks, num_slots)
    chains = [[name(100 * c + i) for i in range(8)] for c in range(12)]
    held: list[tuple[list[int], list[bytes]]] = []  # blocks of requests, and what they must hold
    fresh: list[tuple[list[int], list[bytes], int]] = []  # admitted since the last step, with what is still unknown
    num_loads = 0
    for _ in range(1500):
        if rng.random() < 0.5:
            chain = rng.choice(chains)[: rng.randint(1, 8)]
            found = next((i for i, h in enumerate(chain) if pool.find(h) is None), len(chain))
            prefix = [block for h in chain[:found] if (block := pool.find(h)) is not None]
            loads = tier.match(chain[found:])
            free = pool.num_free - sum(not pool.is_held(block) for block in prefix)
            if len(chain) - found > free:
                continue
            pool.touch(prefix)
            tier.hold(chain[found : found + loads])
            taken = pool.take(len(chain) - found)
            tier.load(chain[found : found + loads], taken[:loads])
            num_loads += loads
            fresh.append((prefix + taken, chain, found + loads))
        elif rng.random() < 0.5:
            copies.execute(tier)
            for blocks, chain, known in fresh:
                assert [copies.device[block] for block in blocks[:known]] == chain[:known], "stale"
                for block, block_hash in zip(blocks[known:], chain[known:], strict=True):
                    copies.device[block] = block_hash  # computed
                pool.register(b"", blocks, chain)
                held.append((blocks, chain))
            fresh.clear()
        elif held:
            pool.free(held.pop(rng.randrange(len(held)))[0])
        tier.check()
        pool.check()
        assert tier.num_cached <= num_slots
        for h in (h for chain in chains for h in chain):
            assert (pool.find(h) is not None) == (h in mirror.cached["device"])
            assert bool(tier.match([h])) == (h in mirror.cached["host"])
        for blocks, chain in held:
            assert [copies.device[block] for block in blocks] == chain
    assert num_loads > 20
