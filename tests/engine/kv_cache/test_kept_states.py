"""States that can be found: in blocks beside those of tokens, in host memory, evicted with what they stand behind."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from app.deployments.routing.prefix_index import PrefixIndex
from app.engine.kv_cache.prefix_hit import LOADED
from app.engine.kv_cache.state_events import StateEvents
from app.engine.kv_cache.state_manager import StateManager
from app.engine.kv_connector.host_memory import HostMemory
from app.records.kv_events import KVEventLog
from app.records.message_borders import MessageBorders
from app.records.request_state import Request
from app.records.state_pool import StatePool
from benchmarks.agent_trace import sessions, share
from tests.engine.kv_cache.test_kv_cache_manager import make_request
from tests.engine.kv_cache.test_state_manager import SIZE, prefill
from tests.engine.scheduler.random_run import RandomRun


class Heard:
    """What a Router makes of the events."""

    def __init__(self) -> None:
        self.index = PrefixIndex()
        self.log = KVEventLog("a", "1")

    def promised(self, request: Request) -> int:
        while (batch := self.log.flush()) is not None:
            self.index.apply(batch)
        match = self.index.match(request.block_hashes[: (request.num_tokens - 1) // SIZE], 0.0)
        return sum(match.get("a", (0, 0)))


def in_blocks(num_blocks: int, per_state: int, heard: Heard | None = None, host: int = 0) -> StateManager:
    events = StateEvents(None if heard is None else heard.log)
    connector = HostMemory(host, 1, events) if host else None
    states = StatePool(64, None, per_state)
    return StateManager(num_blocks, SIZE, states, hash_key=b"key", sink=events, connector=connector)


def answer(kv: StateManager, tokens: list[int]) -> int:
    """Run a prompt to its end; how many of its tokens were cached."""
    request = make_request(kv, tokens)
    cached = kv.find_prefix(request).num_blocks * SIZE
    prefill(kv, request)
    kv.free(request, None)
    kv.take_transfers()
    kv.pool.check()
    return cached


def test_states_and_tokens_share_the_blocks() -> None:
    """Long prompts take the memory of states that nobody needs, and the other way round; nothing is lost."""
    kv = in_blocks(60, 10)
    for number in range(5):
        answer(kv, [1000 * number + i for i in range(10)])
    assert kv.num_states == 4, "of 60 blocks, 4 x (2 + 10 + 1) and what runs"
    answer(kv, list(range(9000, 9200)))
    assert kv.num_states <= 1
    assert kv.pool.num_free == 60


def test_the_router_never_expects_a_hit_that_is_none() -> None:
    """Random conversations in too little memory, with a host tier and without: what was announced is there."""
    for host in (0, 40):
        rng, heard = random.Random(host), Heard()
        kv = in_blocks(50, 6, heard, host)
        conversations: list[list[int]] = [[number] for number in range(4)]
        hits = 0
        for _ in range(150):
            tokens = rng.choice(conversations)
            tokens += [rng.randrange(100) for _ in range(rng.randrange(1, 20))]
            if len(tokens) > 100:
                del tokens[rng.randrange(1, 60) :]
            request = make_request(kv, tokens)
            found = kv.find_prefix(request).num_blocks
            assert heard.promised(request) == found
            hits += found > 0
            answer(kv, tokens)
        assert hits > 30
        assert (host > 0) == (kv.connector is not None and kv.connector.figures()["kv_host_loaded_bytes"] > 0)


def test_a_state_of_the_host_is_loaded_into_blocks_first() -> None:
    kv = in_blocks(24, 6, host=200)
    prompt = list(range(30))
    answer(kv, prompt)
    answer(kv, list(range(1000, 1094)))  # pushes all of it out
    request = make_request(kv, prompt)
    hit = kv.find_prefix(request)
    assert (hit.num_blocks, hit.num_loads, list(hit.state)) == (7, 7, [LOADED] * 6)
    assert kv.admit(request, hit, 30)
    request.row, request.is_loading = 2, True
    assert kv.take_state_copies() is None, "not before its blocks are there"
    transfers = kv.take_transfers()
    request.is_loading = False
    copies = kv.take_state_copies()
    assert copies is not None
    (load,) = copies.loads
    assert set(load.blocks) <= set(transfers.load_blocks.tolist())
    assert not set(load.blocks) & set(request.block_ids)
    kv.free(request, None)
    kv.pool.check()
    assert kv.pool.num_free == 24


def test_what_a_hit_holds_comes_back_however_it_ends() -> None:
    kv = in_blocks(24, 6)
    prompt = list(range(30))
    answer(kv, prompt)
    request = make_request(kv, prompt)
    hit = kv.find_prefix(request)
    assert not kv.admit(request, hit, 200), "too many tokens"
    assert kv.pool.num_free == 24
    assert kv.admit(request, hit, 30)
    kv.free(request, 5)
    assert kv.take_state_copies() is None
    kv.pool.release_until(5)
    kv.pool.check()
    assert kv.pool.num_free == 24
    assert kv.find_prefix(make_request(kv, prompt)) == hit


def test_what_conversations_share_outlives_what_they_left() -> None:
    """Its state is asked for by the border of a message, and is none that the deeper one takes the place of."""
    kv = in_blocks(60, 6)
    head = list(range(8))
    for number in range(6):
        tokens = [*head, *range(100 * number + 100, 100 * number + 130)]
        request = make_request(kv, tokens)
        request.spec = replace(request.spec, asks=(MessageBorders((9, 33)),))
        cached = kv.find_prefix(request).num_blocks
        assert cached == (2 if number else 0)
        prefill(kv, request)
        kv.free(request, None)


def test_agents_find_nearly_what_a_dense_model_finds() -> None:
    """Whole engines without a model behind the Router's book, in little memory (benchmarks.agent_trace)."""
    dense, states = (share(sessions(4, 5), 2, 1 << 30, with_states) for with_states in (False, True))
    assert states["prompt_tokens"] > 100_000
    assert states["cached"] > 0.95 * dense["cached"] > 0.5
    assert states["broken_promises"] == 0


@pytest.mark.parametrize("first", [0, *(pytest.param(first, marks=pytest.mark.slow) for first in range(40, 2000, 40))])
def test_random_lives(first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exact tokens, the right state behind each hit, and nothing held in the end."""
    preemptions = hits = loads = states = 0
    for seed in range(first, first + 40):
        try:
            run = RandomRun(seed, monkeypatch, num_stages=1 + seed % 4, has_states=True)
            stats = run.play().stats()
        except Exception as error:
            raise AssertionError(f"the run of seed {seed} failed: {type(error).__name__}: {error}") from error
        preemptions += stats.figures["preemptions"]
        hits += stats.figures["found_tokens"]
        loads += stats.figures["loaded_tokens"]
        states += run.device.num_given
    assert preemptions > 20
    assert hits > 300
    assert loads > 0
    assert states > 10
