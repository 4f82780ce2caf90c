"""Requests whose prefixes come back from the host, over a device whose loads take their time."""

from __future__ import annotations

import random
from typing import Any

import pytest

from app.deployments.replica.engine_metrics import EngineMetrics
from app.engine.core import EngineCore
from app.engine.kv_connector.host_memory import HostMemory
from app.records.request import EngineRequest
from app.telemetry.metrics_recorder import MetricsRecorder, decode_snapshot
from tests.engine.core_driver import Results, assert_idle, make_request, run
from tests.engine.fake_executor import VOCAB, expected_tokens
from tests.engine.kv_connector.slow_tier import slow_core
from tests.engine.kv_connector.test_host_memory import Mirror


def prompt(group: int, length: int, tail: int = 0) -> list[int]:
    """`length` tokens of the group, and one of its own."""
    rng = random.Random(group)
    return [rng.randrange(VOCAB) for _ in range(length)] + [tail]


def check(requests: list[EngineRequest], results: Results) -> None:
    for request in requests:
        params = request.sampling
        assert params.seed is not None
        assert params.max_tokens is not None
        wanted = expected_tokens(request.prompt_token_ids, params.seed, params.max_tokens)
        assert results.tokens[request.request_id] == wanted, request.request_id


def tier_of(core: EngineCore) -> HostMemory:
    tier = core.scheduler.kv.connector
    assert isinstance(tier, HostMemory)
    return tier


def nothing_left(core: EngineCore) -> None:
    assert_idle(core)
    tier_of(core).check()
    assert not core.scheduler._loading._by_generation
    assert tier_of(core).take_transfers() is None


def test_a_hit_is_reported_and_counted() -> None:
    core, device = slow_core(num_blocks=16, num_slots=64)
    first, other = make_request("a", prompt(1, 40)), make_request("b", prompt(2, 40))
    check([first, other], run(core, [other], results=run(core, [first])))
    again = make_request("c", prompt(1, 40, tail=5))
    results = run(core, [again])
    check([again], results)
    final = results.final["c"]
    assert final.num_cached_tokens == 40
    assert device.num_loaded >= 8  # the device may still have had the first few
    recorder = MetricsRecorder({"model_name": "m", "engine": "0"})
    values = decode_snapshot(EngineMetrics(recorder).snapshot(core.stats())).values
    assert values["vllm:external_prefix_cache_hits_total"][()] == 4 * device.num_loaded
    assert values["vllm:external_prefix_cache_queries_total"][()] >= values["vllm:external_prefix_cache_hits_total"][()]
    assert values["manta:kv_host_loaded_bytes_total"][()] == 8 * device.num_loaded
    assert values["manta:kv_host_stored_bytes_total"][()] >= 8 * device.num_loaded
    assert 0 < values["manta:kv_host_usage_perc"][()] <= 1
    nothing_left(core)


def test_others_never_wait_for_a_load() -> None:
    """While requests decode, one whose blocks are on their way stays out of the steps, and no step waits."""
    core, device = slow_core(num_blocks=64, delay=6, late=True)
    run(core, [make_request(f"w{g}", prompt(g, 60), max_tokens=1) for g in range(8)])
    running = make_request("running", prompt(100, 8), max_tokens=120)
    core.add_request(running)
    results = Results()
    for _ in range(4):
        results.take(core.step())
    loaders = [make_request(f"l{g}", prompt(g, 60, tail=9), max_tokens=4) for g in range(3)]
    run(core, loaders, results=results)
    check([running, *loaders], results)
    assert device.num_loaded >= 30
    assert device.waits_beside_others == 0
    assert results.order[-1] == "running"
    nothing_left(core)


def test_with_nothing_else_to_do_a_load_is_waited_for_at_once() -> None:
    core, device = slow_core(num_blocks=20, delay=10_000, late=True)
    run(core, [make_request(f"w{g}", prompt(g, 60), max_tokens=1) for g in range(3)])
    loader = make_request("l", prompt(0, 60, tail=9), max_tokens=4)
    results = run(core, [loader], max_steps=12)
    check([loader], results)
    assert device.num_loaded > 0
    nothing_left(core)


def test_when_the_others_end_first_the_load_is_waited_for() -> None:
    core, device = slow_core(num_blocks=40, delay=10_000, late=True)
    run(core, [make_request(f"w{g}", prompt(g, 60), max_tokens=1) for g in range(6)])
    core.add_request(make_request("short", prompt(50, 8), max_tokens=6))
    results = Results()
    results.take(core.step())
    run(core, [make_request("l", prompt(0, 60, tail=9), max_tokens=4)], results=results, max_steps=60)
    assert results.order == ["short", "l"]
    assert device.num_loaded > 0
    nothing_left(core)


@pytest.mark.parametrize("late", [False, True])
def test_aborts_and_pauses_while_loading_leave_nothing_behind(late: bool) -> None:
    core, _ = slow_core(num_blocks=48, num_slots=200, delay=8, late=late, seed=3)
    run(core, [make_request(f"w{g}", prompt(g, 60), max_tokens=1) for g in range(8)])
    core.add_request(make_request("running", prompt(99, 8), max_tokens=150))
    results = Results()
    kept: list[EngineRequest] = []
    for i in range(24):
        request = make_request(f"r{i}", prompt(i % 8, 60, tail=i), max_tokens=3)
        core.add_request(request)
        for _ in range(i % 3):
            results.take(core.step())
        if i % 3 == 0:
            core.abort_requests([request.request_id])
        else:
            kept.append(request)
            if i % 3 == 1:
                core.pause(request.request_id)
                results.take(core.step())
                core.resume(request.request_id)
    run(core, results=results)
    check(kept, results)
    assert sum(final.finish_reason == "abort" for final in results.final.values()) == 8
    nothing_left(core)


@pytest.mark.parametrize("seed", range(8))
def test_random_traffic_over_small_pools(seed: int) -> None:
    """Shared prefixes, preemption, aborts, pauses, several steps in flight; every answer is right."""
    rng = random.Random(seed)
    mirror = Mirror()
    options: dict[str, Any] = {
        "max_num_seqs": rng.choice([3, 8, 16]),
        "max_num_batched_tokens": rng.choice([24, 64, 512]),
        "max_inflight_steps": rng.choice([1, 2, 4]),
    }
    core, device = slow_core(
        num_blocks=rng.choice([24, 40, 64]),
        num_slots=rng.choice([10, 60, 300]),
        late=rng.random() < 0.5,
        delay=rng.choice([0, 3, 9]),
        seed=seed,
        sink=mirror,
        **options,
    )
    requests = [
        make_request(
            f"r{i}", prompt(rng.randrange(6), rng.randint(4, 60), tail=i % 3), seed=i, max_tokens=rng.randint(1, 24)
        )
        for i in range(60)
    ]
    gone: set[str] = set()
    pending = list(requests)
    results = Results()
    paused: str | None = None
    while pending or core.has_work() or paused:
        for _ in range(rng.randint(0, 3)):
            if pending:
                core.add_request(pending.pop())
        if paused and rng.random() < 0.4:
            core.resume(paused)
            paused = None
        live = sorted(core.scheduler.requests)
        if live and rng.random() < 0.05:
            gone.add(victim := rng.choice(live))
            core.abort_requests([victim])
        elif live and not paused and rng.random() < 0.1:
            core.pause(paused := rng.choice(live))
        if core.has_work():
            results.take(core.step())
        core.scheduler.kv.pool.check()
        tier_of(core).check()
    check([request for request in requests if request.request_id not in gone], results)
    assert device.num_loaded > 0
    pool = core.scheduler.kv.pool
    assert all(pool.find(h) is not None for h in mirror.cached["device"])
    assert len(mirror.cached["device"]) == pool.num_cached
    assert len(mirror.cached["host"]) == tier_of(core).num_cached
    assert all(tier_of(core).match([h]) for h in mirror.cached["host"])
    nothing_left(core)


def test_prompt_logprobs_are_computed_and_not_loaded() -> None:
    core, device = slow_core(num_blocks=20)
    run(core, [make_request(f"w{g}", prompt(g, 60), max_tokens=1) for g in range(3)])
    loaded = device.num_loaded
    results = run(core, [make_request("p", prompt(0, 60), max_tokens=1, prompt_logprobs=1)])
    assert results.first["p"].prompt_logprobs is not None
    assert device.num_loaded == loaded
