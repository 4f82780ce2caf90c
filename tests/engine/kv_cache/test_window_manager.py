"""Groups of layers with windows: who keeps which blocks, what is a hit, and random lives of an engine.

What random lives cannot tell is here by example: that blocks are given back at once, and which prefixes are found.
"""

from __future__ import annotations

import numpy as np
import pytest

from app.engine.kv_cache.prefix_hit import NO_HIT
from app.engine.kv_cache.running_rows import RunningRows
from app.engine.kv_cache.window_manager import FirstGroup, WindowManager
from app.engine.kv_connector.host_memory import HostMemory
from app.records.kv_groups import KVGroups, Windows
from app.records.request_state import Request
from tests.engine.kv_cache.test_kv_cache_manager import make_request
from tests.engine.scheduler.random_run import RandomRun

NOBODY = RunningRows(*(np.zeros(0, np.int32) for _ in range(3)))


class Heard:
    """A KVEventSink that keeps what it hears."""

    def __init__(self) -> None:
        self.hashes: set[bytes] = set()

    def report_stored(self, parent: bytes, hashes: list[bytes], tier: str = "device") -> None:
        self.hashes |= set(hashes)

    def report_removed(self, hashes: list[bytes], tier: str = "device") -> None:
        self.hashes -= set(hashes)


def make(
    windows: Windows = (None, 6), num_blocks: int = 64, num_slots: int = 0, sink: Heard | None = None
) -> WindowManager:
    """Blocks of 4 tokens, 8 tokens in flight."""
    first = None if sink is None else FirstGroup(sink)
    connector = HostMemory(num_slots, 0, first) if num_slots else None
    return WindowManager(
        num_blocks, KVGroups(windows, 4), hash_key=b"key", max_tokens_in_flight=8, sink=first, connector=connector
    )


def compute(kv: WindowManager, tokens: list[int], chunk: int = 8) -> Request:
    """A request all of whose tokens have been computed, chunk after chunk."""
    request = make_request(kv, tokens)
    hit = kv.find_prefix(request)
    done = hit.num_blocks * 4
    assert kv.admit(request, hit, done)
    while done < len(tokens):
        done = min(done + chunk, len(tokens))
        assert kv.grow(request, done) is not None
        kv.publish(request, done)
    return request


def test_a_sliding_group_keeps_its_window_and_gives_the_rest_back_at_once() -> None:
    kv = make()
    request = compute(kv, list(range(41)))
    full, sliding = request.block_ids[::2], request.block_ids[1::2]
    assert len(full) == len(sliding) == 11
    assert all(full)
    # Token 40, the next, sees tokens from 35 on: those of block 8 and behind.
    assert [bool(block) for block in sliding] == [False] * 8 + [True] * 3
    assert kv.pool.num_free == 64 - 1 - 11 - 3
    kv.free(request, None)
    assert kv.pool.num_free == 63
    kv.pool.check()


def test_without_a_prefix_cache_windows_are_given_back_too() -> None:
    kv = make()
    kv.enable_prefix_caching = False
    compute(kv, list(range(41)))
    assert (kv.pool.num_free, kv.pool.num_cached) == (64 - 1 - 11 - 3, 0)


def test_a_hit_needs_the_window_before_its_end_and_no_more() -> None:
    kv = make()
    kv.free(compute(kv, list(range(41))), None)
    longer = make_request(kv, [*range(40), 99, 98])
    hit = kv.find_prefix(longer)
    assert hit.num_blocks == 10
    assert [bool(block) for block in hit.table[1::2]] == [False] * 8 + [True] * 2
    assert kv.admit(longer, hit, 42)
    assert len(longer.block_ids) == 2 * 11


@pytest.mark.parametrize(
    ("lost", "found"),
    [
        ([(1, 9)], 9),  # the window before block 9 ends in block 8
        ([(1, 8)], 8),
        ([(1, 9), (1, 7)], 7),
        ([(1, 3)], 10),  # nobody needs it
        ([(0, 6)], 6),
        ([(0, 6), (1, 5)], 5),
        ([(1, block) for block in range(10)], 0),
        ([(1, block) for block in range(1, 10)], 1),
    ],
)
def test_the_longest_prefix_that_all_groups_have(lost: list[tuple[int, int]], found: int) -> None:
    kv = make()
    request = compute(kv, list(range(41)))
    kv.free(request, None)
    for group, block in lost:
        held = kv.pool.find(request.block_hashes[block] + kv._suffixes[group])
        assert held is not None
        del kv.pool._by_hash[request.block_hashes[block] + kv._suffixes[group]]
    assert kv.find_prefix(make_request(kv, [*range(40), 99])).num_blocks == found


def test_where_all_layers_slide_the_beginning_may_be_gone() -> None:
    kv = make((6,), num_blocks=8)
    request = compute(kv, list(range(41)))  # 11 blocks one after the other in a pool of 7
    kv.free(request, None)
    assert kv.pool.find(request.block_hashes[0]) is None
    hit = kv.find_prefix(make_request(kv, [*range(40), 99]))
    assert (hit.num_blocks, len(hit.held)) == (10, 2)


def test_what_the_device_gave_up_is_loaded_group_by_group() -> None:
    kv = make(num_blocks=20, num_slots=64)
    kv.free(compute(kv, list(range(33))), None)
    kv.free(compute(kv, list(range(100, 133))), None)  # which takes the blocks of the first
    request = make_request(kv, [*range(32), 99])
    hit = kv.find_prefix(request)
    assert hit.num_blocks == 8
    assert hit.num_loads > 0
    assert kv.admit(request, hit, 33)
    transfers = kv.take_transfers()
    assert transfers is not None
    assert len(transfers.load_blocks) == hit.table.count(-1)
    assert set(transfers.load_blocks.tolist()) <= set(request.block_ids)
    kv.publish(request, 32)
    kv.free(request, None)
    kv.pool.check()


def test_events_tell_of_the_first_group() -> None:
    heard = Heard()
    kv = make(num_blocks=24, num_slots=8, sink=heard)
    request = compute(kv, list(range(41)))
    assert heard.hashes == set(request.block_hashes)
    kv.free(request, None)
    for start in range(100, 400, 50):
        kv.free(compute(kv, list(range(start, start + 41))), None)
    on_device = {key for key in kv.pool._by_hash if len(key) == 16}
    in_host = {key for key in kv.connector._slots if len(key) == 16}  # type: ignore[union-attr]
    assert heard.hashes == on_device | in_host


def test_a_long_request_fits_where_its_windows_do() -> None:
    kv = make(num_blocks=1 + 25 + 4)  # 100 tokens in full, four blocks of the other group
    assert kv.max_tokens == 100
    assert kv.fits(100, NO_HIT, NOBODY)
    assert not kv.fits(101, NO_HIT, NOBODY)
    assert kv.num_slots_after_hit(NO_HIT) == 12  # it comes in chunks of what there is
    running = RunningRows(np.array([40], np.int32), np.array([8], np.int32), np.array([8], np.int32))
    assert kv.fits(4, NO_HIT, running)
    assert kv.fits(48, NO_HIT, running)  # 12 + 8 blocks, and 4 + 2 that last, and 3 that pass: the other group's
    assert not kv.fits(49, NO_HIT, running)


def play(seeds: range, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int, int]:
    preemptions = hits = loads = 0
    for seed in seeds:
        try:
            run = RandomRun(seed, monkeypatch, num_stages=1 + seed % 4, has_windows=True)
            stats = run.play().stats()
        except Exception as error:
            raise AssertionError(f"the run of seed {seed} failed: {type(error).__name__}: {error}") from error
        preemptions += stats.figures["preemptions"]
        hits += stats.figures["found_tokens"]
        loads += stats.figures["loaded_tokens"]
    return preemptions, hits, loads


def test_a_sample_of_random_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exact tokens and nothing held in the end, over a device that checks every slot that a step may read."""
    preemptions, hits, loads = play(range(60), monkeypatch)
    assert preemptions > 60
    assert hits > 1000
    assert loads > 80


def test_a_request_preempted_between_an_eviction_and_its_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """It took blocks whose content goes to the host with the next step message, and gives them back before that."""
    play(range(4573, 4574), monkeypatch)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("first", range(0, 5000, 1000))
def test_five_thousand_random_lives(first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    play(range(first, first + 1000), monkeypatch)
