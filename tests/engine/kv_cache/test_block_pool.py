"""The block pool: who holds what, against a plain model, over many random operations."""

from __future__ import annotations

import random

import pytest

from app.engine.kv_cache.block_pool import BlockPool


class Sink:
    """Rebuilds the set of cached hashes from the events alone."""

    def __init__(self) -> None:
        self.cached: set[bytes] = set()
        self.parents: dict[bytes, bytes] = {}

    def report_stored(self, parent: bytes, hashes: list[bytes]) -> None:
        assert hashes
        for block_hash in hashes:
            assert block_hash not in self.cached, "stored twice"
            self.cached.add(block_hash)
            self.parents[block_hash] = parent
            parent = block_hash

    def report_removed(self, hashes: list[bytes]) -> None:
        for block_hash in hashes:
            self.cached.remove(block_hash)


def name(number: int) -> bytes:
    return number.to_bytes(16, "little")


def test_take_and_free() -> None:
    pool = BlockPool(4)
    blocks = pool.take(3)
    assert len(set(blocks)) == 3
    assert pool.num_free == 1
    pool.free(blocks)
    assert pool.num_free == 4
    pool.check()


def test_a_freed_block_stays_findable_until_it_is_needed() -> None:
    pool = BlockPool(2)
    (block,) = pool.take(1)
    pool.register(b"root", [block], [name(1)])
    pool.free([block])
    assert pool.find(name(1)) == block
    pool.touch([block])
    assert pool.is_held(block)
    assert pool.num_free == 1
    pool.free([block])
    pool.take(2)
    assert pool.find(name(1)) is None


def test_blank_blocks_go_before_cached_ones_and_tails_before_heads() -> None:
    pool = BlockPool(5)
    chain = pool.take(3)
    pool.register(b"root", chain, [name(i) for i in range(3)])
    pool.free(chain)
    assert not set(pool.take(2)) & set(chain)
    assert pool.take(1) == [chain[2]]  # the end of the prefix is evicted first
    assert pool.find(name(0)) == chain[0]
    assert pool.find(name(2)) is None


def test_least_recently_used_goes_first() -> None:
    pool = BlockPool(3)
    blocks = pool.take(3)
    for i, block in enumerate(blocks):
        pool.register(b"root", [block], [name(i)])
    for block in blocks:
        pool.free([block])
    pool.touch([blocks[0]])
    pool.free([blocks[0]])  # used again: now the latest
    assert pool.take(2) == [blocks[1], blocks[2]]


def test_a_shared_block_is_free_only_when_all_have_let_go() -> None:
    pool = BlockPool(1)
    (block,) = pool.take(1)
    pool.register(b"root", [block], [name(1)])
    pool.touch([block])
    pool.free([block])
    assert pool.num_free == 0
    pool.free([block])
    assert pool.num_free == 1
    with pytest.raises(AssertionError, match="freed twice"):
        pool.free([block])


def test_of_two_equal_blocks_the_first_stays() -> None:
    sink = Sink()
    pool = BlockPool(4, sink)
    first, second, third = pool.take(3)
    pool.register(b"root", [first], [name(1)])
    pool.register(b"root", [second, third], [name(1), name(2)])
    assert pool.find(name(1)) == first
    assert pool.find(name(2)) == third
    assert sink.parents == {name(1): b"root", name(2): name(1)}
    pool.free([second, third])
    assert pool.take(2)[0] != first
    pool.check()


def test_deferred_blocks_wait_for_their_step() -> None:
    pool = BlockPool(3)
    blocks = pool.take(3)
    pool.free(blocks[:1], after_step=5)
    pool.free(blocks[1:], after_step=4)
    assert (pool.num_free, pool.num_deferred) == (0, 3)
    pool.release_until(4)
    assert (pool.num_free, pool.num_deferred) == (2, 1)
    pool.release_until(5)
    assert (pool.num_free, pool.num_deferred) == (3, 0)
    pool.check()


@pytest.mark.parametrize("seed", range(4))
def test_random_operations_keep_the_invariants(seed: int) -> None:
    """10,000 allocate / share / register / free / defer / evict operations a seed, against a plain model."""
    rng = random.Random(seed)
    sink = Sink()
    pool = BlockPool(48, sink)
    holders: list[list[int]] = []  # each entry holds its blocks once
    deferred: list[tuple[int, list[int]]] = []
    step = 0
    content: dict[int, bytes] = {}  # block -> hash it was registered under, while held
    next_name = 0
    for operation in range(10_000):
        choice = rng.random()
        if choice < 0.35:
            count = rng.randint(1, 6)
            if count <= pool.num_free:
                taken = pool.take(count)
                held = {b for blocks in holders for b in blocks} | {b for _, blocks in deferred for b in blocks}
                assert not held & set(taken), "handed out a block that somebody holds"
                for block in taken:
                    content.pop(block, None)
                holders.append(taken)
        elif choice < 0.5 and holders:
            blocks = rng.choice(holders)
            hashes = []
            for _ in blocks:
                repeat = rng.random() < 0.2 and next_name
                hashes.append(name(rng.randrange(next_name) if repeat else next_name))
                next_name += not repeat
            pool.register(b"root", blocks, hashes)
            for block, block_hash in zip(blocks, hashes, strict=True):
                if pool.find(block_hash) == block:
                    content[block] = block_hash
        elif choice < 0.65 and content:
            block, block_hash = rng.choice(sorted(content.items()))
            if pool.find(block_hash) == block:
                pool.touch([block])
                holders.append([block])
        elif choice < 0.9 and holders:
            blocks = holders.pop(rng.randrange(len(holders)))
            if rng.random() < 0.3:
                step += 1
                deferred.append((step, blocks))
                pool.free(blocks, after_step=step)
            else:
                pool.free(blocks)
        elif deferred:
            returned = rng.choice(deferred)[0]
            pool.release_until(returned)
            deferred = [entry for entry in deferred if entry[0] > returned]
        counts = [0] * pool.num_blocks
        for blocks in holders + [blocks for _, blocks in deferred]:
            for block in blocks:
                counts[block] += 1
        assert pool.num_free == counts.count(0)
        assert [pool.is_held(block) for block in range(pool.num_blocks)] == [count > 0 for count in counts]
        if operation % 20 == 0:
            pool.check()
            assert len(sink.cached) == pool.num_cached
            assert all(pool.find(block_hash) is not None for block_hash in sink.cached)
    for blocks in holders:
        pool.free(blocks)
    pool.release_until(step)
    pool.check()
    assert pool.num_free == pool.num_blocks
