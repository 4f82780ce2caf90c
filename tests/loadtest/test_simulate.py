"""The simulator: nothing is lost, what can be computed by hand comes out, equal seeds give equal results."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from app.deployments.routing.policies.prefix_aware import ADAPTER_LOAD_S
from loadtest import simulate as command
from loadtest.simulation.approximate_tree import ApproximateTree
from loadtest.simulation.cell import Result, Setting, simulate
from loadtest.simulation.fleet import Fleet
from loadtest.simulation.replica import MAX_NUM_BATCHED_TOKENS
from loadtest.simulation.sim_adapters import NUM_SLOTS, READ_S, SimAdapters
from loadtest.simulation.speeds import Speeds
from loadtest.simulation.traces import TRACES, create_trace
from loadtest.simulation.traffic import BLOCK_SIZE, SimRequest, Text, Trace, answered, reuse

POLICIES = command.DEFAULT_POLICIES


@pytest.mark.parametrize("name", TRACES)
@pytest.mark.parametrize("policy", ["power_of_two", "approximate_tree", "prefix_aware"])
def test_every_request_ends_once(name: str, policy: str) -> None:
    trace = create_trace(name, 120, 8, seed=3)
    fleet = Fleet(policy, 8, num_blocks=2000)
    fleet.run(trace, 12.0)
    requests = list(trace)
    assert len(requests) >= 120
    for request in requests:
        assert request.sent_s < request.first_token_s <= request.ended_s
        assert 0 <= request.num_cached_tokens < request.prompt.num_tokens + request.num_output_tokens
        if name != "churn":
            assert request.num_placements == 1
    placements = sum(request.num_placements for request in requests)
    everyone = [*fleet.replicas.values(), *fleet.retired]
    assert placements == sum(replica.num_requests for replica in everyone) >= len(requests)
    assert not any(replica.jobs() for replica in fleet.replicas.values())
    assert len(fleet.replicas) == 8
    assert len(fleet.retired) == len(trace.deaths)


def test_requests_of_a_dead_replica_go_on_elsewhere() -> None:
    rng = random.Random(1)
    roots = [answered(rng, Text().then(rng, 4000), 400, 0.0) for _ in range(32)]
    fleet = Fleet("prefix_aware", 4, num_blocks=4000)
    fleet.run(Trace("one death", roots, deaths=[0.1]), 10.0)
    (dead,) = fleet.retired
    assert fleet.num_replaced > 0
    again = [request for request in roots if request.num_placements > 1]
    assert len(again) == fleet.num_replaced
    assert all(request.replica != dead.name for request in roots if request.ended_s > 2.1)


def test_one_replica_with_room_for_all_hits_what_an_endless_cache_would() -> None:
    """By hand: of each group's n prompts, n - 1 find the full blocks of the common part."""
    rng = random.Random(5)
    sizes, requests = [1000, 2048, 3000], []
    for size in sizes:
        common = Text().then(rng, size)
        requests += [answered(rng, common.then(rng, 50), 8, 0.0) for _ in range(6)]
    rng.shuffle(requests)
    for i, request in enumerate(requests):
        request.at = i / len(requests)
    trace = Trace("groups", requests)
    fleet = Fleet("prefix_aware", 1, num_blocks=5000)
    fleet.run(trace, 60.0)
    expected = sum(5 * (size // BLOCK_SIZE) * BLOCK_SIZE for size in sizes)
    assert sum(request.num_cached_tokens for request in requests) == expected
    hits, working_set = reuse(trace)
    assert hits * BLOCK_SIZE == expected
    assert working_set == sum(size // BLOCK_SIZE for size in sizes)


def test_a_lone_request_takes_what_its_steps_take() -> None:
    rng, speeds = random.Random(7), Speeds()
    request = answered(rng, Text().then(rng, 5000), 100, 0.0)
    fleet = Fleet("round_robin", 1, num_blocks=1000)
    fleet.run(Trace("one", [request]), 1.0)
    chunks = [MAX_NUM_BATCHED_TOKENS, MAX_NUM_BATCHED_TOKENS, 5000 - 2 * MAX_NUM_BATCHED_TOKENS]
    prefill_s = sum(speeds.prefill_s(count, sum(chunks[:i])) for i, count in enumerate(chunks))
    assert request.first_token_s - request.sent_s == pytest.approx(prefill_s + 0.003)  # three hops
    decode_s = sum(speeds.decode_s(1, 5000 + i) for i in range(1, 100))
    assert request.ended_s - request.first_token_s == pytest.approx(decode_s)


def test_a_leap_that_is_cut_ends_where_single_steps_would() -> None:
    """Another request arrives while the first one decodes: its first token waits for the running step only."""
    rng = random.Random(9)
    first = answered(rng, Text().then(rng, 256), 200, 0.0)
    second = answered(rng, Text().then(rng, 256), 4, 0.5)
    fleet = Fleet("round_robin", 1, num_blocks=1000)
    fleet.run(Trace("two", [first, second]), 2.0)
    assert second.first_token_s - second.sent_s < 0.05
    assert second.ended_s < first.ended_s


def test_speeds_go_through_the_measurements() -> None:
    speeds = Speeds()
    assert speeds.prefill_s(2048) == pytest.approx(0.0587, rel=0.01)
    assert speeds.prefill_s(8192) == pytest.approx(0.2622, rel=0.01)
    assert speeds.prefill_s(1000) + speeds.prefill_s(500, 1000) == pytest.approx(speeds.prefill_s(1500))
    assert speeds.decode_s(32, 0) == pytest.approx(0.00908)


def test_equal_seeds_give_equal_results_and_others_do_not() -> None:
    def outcome(seed: int) -> tuple[float, ...]:
        result = simulate(Setting("agents", 4, 0.75, "prefix_aware", requests_per_replica=16, seed=seed))
        return result.ttft_p50_s, result.ttft_p99_s, result.e2e_p99_s, result.hit_rate, result.imbalance

    assert outcome(1) == outcome(1) != outcome(2)


def test_policies_that_know_the_caches_win_where_it_is_clear_cut() -> None:
    """Twelve long prompts for four caches of four each: blind policies push out what they will need."""
    results: dict[str, Result] = {}
    for policy in POLICIES:
        setting = Setting("documents", 8, 0.75, policy, requests_per_replica=16, load=0.9)
        results[policy] = simulate(setting)
    for knowing in ("prefix_aware", "approximate_tree", "session_affinity"):
        for blind in ("round_robin", "power_of_two"):
            assert results[knowing].hit_rate > 1.5 * results[blind].hit_rate
            assert results[knowing].ttft_p90_s < 0.6 * results[blind].ttft_p90_s
    assert all(result.hit_rate <= result.ideal_hit_rate + 1e-9 for result in results.values())


@pytest.mark.parametrize("trace", ["agents", "documents"])
def test_siblings_find_their_prefix_as_often_as_at_a_router_that_never_spreads(trace: str) -> None:
    tree, ours = (simulate(Setting(trace, 8, 0.4, policy, 16)) for policy in ("approximate_tree", "prefix_aware"))
    assert ours.hit_rate > tree.hit_rate - 0.02
    assert ours.ttft_p99_s < 1.1 * tree.ttft_p99_s


def test_rows_have_as_many_adapters_as_there_are_slots() -> None:
    adapters, digests = SimAdapters(), [f"{number:032x}" for number in range(NUM_SLOTS + 1)]
    for digest in ("", *digests[:-1], digests[3]):
        adapters.enter(digest)
    assert adapters.has_room("")
    assert adapters.has_room(digests[3])
    assert not adapters.has_room(digests[-1])
    assert set(adapters.state.running) == set(digests[:-1])
    assert adapters.take_load_s() == pytest.approx(NUM_SLOTS * ADAPTER_LOAD_S)
    adapters.leave(digests[3])
    assert not adapters.has_room(digests[-1])
    adapters.leave(digests[3])
    adapters.enter(digests[-1])
    assert adapters.num_loads == NUM_SLOTS + 1
    assert adapters.take_load_s() == ADAPTER_LOAD_S


def test_adapters_are_loaded_less_often_by_who_knows_where_they_are() -> None:
    blind, ours = (simulate(Setting("adapters", 8, 0.4, policy, 24)) for policy in ("power_of_two", "prefix_aware"))
    assert 0 < ours.adapter_loads < 0.9 * blind.adapter_loads
    assert ours.ttft_p99_s < blind.ttft_p99_s


def test_an_adapter_on_disk_is_read_beside_the_steps_and_takes_the_place_of_an_unused_one() -> None:
    adapters, (first, second, third) = SimAdapters(2), (f"{number:032x}" for number in range(3))
    assert set(adapters.state.on_disk) == set()
    assert first in adapters.state.on_disk
    assert not adapters.has_room(first)
    assert adapters.left_s == READ_S
    assert not adapters.has_room(second)
    adapters.advance(READ_S)
    assert adapters.left_s is None
    assert adapters.has_room(first)
    assert first not in adapters.state.on_disk
    adapters.enter(first)
    for number, digest in enumerate((second, third), 1):
        assert not adapters.has_room(digest)
        adapters.advance((number + 1) * READ_S)
        assert adapters.has_room(digest)
    assert not adapters.has_room(second), "it made room, as the first has a row"
    assert adapters.num_reads == 4


def test_with_adapters_on_disk_ours_reads_as_seldom_as_serves_multiplexing_and_spreads_them_better() -> None:
    ours, serve = (
        simulate(Setting("adapters", 4, 0.4, policy, 80, adapter_places=20))
        for policy in ("prefix_aware", "serve_multiplexing")
    )
    assert 0 < ours.adapter_reads < 1.02 * serve.adapter_reads
    assert ours.ttft_p90_s < serve.ttft_p90_s


def test_the_approximate_tree_keeps_no_more_than_a_cache_would() -> None:
    trace = create_trace("documents", 60, 2, seed=1)
    fleet = Fleet("approximate_tree", 2, num_blocks=700)
    fleet.run(trace, 30.0)
    policy = fleet._book._policy
    assert isinstance(policy, ApproximateTree)
    assert all(len(sent) <= 700 for sent in policy._sent.values())
    assert set(policy._holders) == {h for sent in policy._sent.values() for h in sent}


def test_follow_ups_wait_for_what_they_follow() -> None:
    trace = create_trace("chat", 60, 4, seed=2)
    Fleet("session_affinity", 4, num_blocks=3000).run(trace, 10.0)

    def check(request: SimRequest) -> int:
        for follower in request.then:
            assert follower.sent_s >= request.ended_s
            assert follower.prompt.hashes[: len(request.whole.hashes)] == request.whole.hashes
        return 1 + sum(map(check, request.then))

    assert sum(map(check, trace.roots)) == len(list(trace))


def test_the_command_writes_tables_and_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "sim"
    arguments = ["--replicas", "2,3", "--pressure", "0.5", "--trace", "bursts", "--requests-per-replica", "8"]
    results = command.main([*arguments, "--policies", "round_robin,prefix_aware", "--out", str(out)])
    assert [(r.setting.num_replicas, r.setting.policy) for r in results] == [
        *((2, "round_robin"), (2, "prefix_aware")),
        *((3, "round_robin"), (3, "prefix_aware")),
    ]
    cells = json.loads(out.with_suffix(".json").read_text())["cells"]
    assert [cell["hit_rate"] for cell in cells] == [result.hit_rate for result in results]
    page = out.with_suffix(".html").read_text()
    assert page.count("<svg") == 4
    assert "prefix_aware" in page
    assert out.with_suffix(".md").read_text() in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--trace", "nothing"], "nothing"),
        (["--policies", "nobody"], "nobody"),
        (["--replicas", "0"], "at least one replica"),
        (["--pressure", "0"], "above 0"),
        (["--load", "0"], "--load"),
    ],
)
def test_wrong_options_are_named(arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main(arguments)
    assert named in capsys.readouterr().err
