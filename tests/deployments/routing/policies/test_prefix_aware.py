"""Cache against queue: the cost in seconds, and what it decides."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from app.deployments.routing.policies import create_policy
from app.deployments.routing.policies.base import Matches, ReplicaLoad, RouteQuery
from app.deployments.routing.policies.prefix_aware import (
    DECODE_GROWTH,
    DELAY_WEIGHT,
    EVICTION_WEIGHT,
    HOST_CREDIT,
    MOST_UNEQUAL,
    OVERLOAD_SHARE,
    PrefixAware,
)
from app.deployments.routing.prefix_index import PrefixMatch
from app.records.adapter import AdapterState
from app.records.load_report import LoadReport

QUERY = RouteQuery(num_prompt_tokens=1600, max_tokens=100)


def load(name: str, **fields: Any) -> ReplicaLoad:
    values = {"num_running": 0, "num_waiting": 0, "prefill_token_s": 1e-3, "decode_step_s": 0.01, **fields}
    report = {key: value for key, value in values.items() if key in LoadReport.__struct_fields__}
    first = (report.pop("num_running"), report.pop("num_waiting"))
    own = {key: value for key, value in values.items() if key not in LoadReport.__struct_fields__}
    return ReplicaLoad(LoadReport("m", name, "1", True, *first, 0, 1000, 16, 0, **report), **own)  # type: ignore[arg-type]


def choose(loads: list[ReplicaLoad], matches: Matches | None = None) -> str:
    return PrefixAware().choose(loads, QUERY, matches or {}).replica_id


def test_the_parts_of_the_cost_are_seconds() -> None:
    one = load(
        "a",
        num_running=10,
        max_num_seqs=100,
        resident_tokens=8000,
        queued_prefill_tokens=500,
        routed_prefill_tokens=200,
        indexed_blocks=500,
    )
    cost = PrefixAware().costs([one], QUERY, {"a": PrefixMatch(50, 20)})["a"]
    uncached = 1600 - 50 * 16 - HOST_CREDIT * 20 * 16
    assert cost.queue_s == pytest.approx(0.7)
    assert cost.prefill_s == pytest.approx(uncached * 1e-3)
    fullness = (8000 + 200) / 16000  # the KV cache's; a tenth of max_num_seqs is taken
    assert cost.decode_s == pytest.approx(100 * 0.01 * DECODE_GROWTH * fullness)
    assert cost.eviction_s == pytest.approx(EVICTION_WEIGHT * cost.prefill_s / 2)
    assert cost.delay_s == pytest.approx(DELAY_WEIGHT * cost.prefill_s)
    assert cost.total_s == pytest.approx(sum(cost[1:]))


def test_the_cached_prefix_wins_until_the_queue_costs_more() -> None:
    cached = {"a": PrefixMatch(75)}  # saves 1.2 s of 1.6 s, and 0.6 s of others' waiting
    assert choose([load("a"), load("b")], cached) == "a"
    assert choose([load("a", queued_prefill_tokens=1700), load("b")], cached) == "a"
    assert choose([load("a", queued_prefill_tokens=1900), load("b")], cached) == "b"
    assert choose([load("a", routed_prefill_tokens=1900), load("b")], cached) == "b"


def test_what_several_hold_spreads_further_sooner() -> None:
    """It is asked for often: a copy more will be used again, so nobody waits for its prefill in vain."""
    queues = [load(name, queued_prefill_tokens=1700) for name in "abcd"]
    assert choose([*queues, load("e")], {"a": PrefixMatch(75)}) == "a"
    assert choose([*queues, load("e")], {name: PrefixMatch(75) for name in "abcd"}) == "e"


def test_host_memory_is_worth_less_than_the_device_and_more_than_nothing() -> None:
    three = [load("a"), load("b"), load("c")]
    assert choose(three, {"a": PrefixMatch(0, 60), "b": PrefixMatch(60, 0)}) == "b"
    assert choose(three, {"a": PrefixMatch(0, 60)}) == "a"


def test_a_faster_replica_is_worth_a_longer_queue() -> None:
    slow, fast = load("a"), load("b", prefill_token_s=1e-4, queued_prefill_tokens=4000)
    assert choose([slow, fast]) == "b"


def test_a_wild_measurement_counts_in_part() -> None:
    loads = [load("a"), load("b"), load("c", prefill_token_s=1.0)]
    costs = PrefixAware().costs(loads, QUERY)
    assert costs["c"].prefill_s == pytest.approx(MOST_UNEQUAL * costs["a"].prefill_s)
    noisy = [load("a"), load("b", prefill_token_s=1.9e-3), load("c", prefill_token_s=0.6e-3)]
    assert len({cost.prefill_s for cost in PrefixAware().costs(noisy, QUERY).values()}) == 1


def test_unmeasured_times_are_those_of_the_others() -> None:
    new = load("b", prefill_token_s=0.0, decode_step_s=0.0)
    costs = PrefixAware().costs([load("a"), new], QUERY)
    assert costs["a"] == costs["b"]
    only = PrefixAware().costs([new], QUERY)["b"]
    assert only.prefill_s > 0


def test_equal_ones_take_turns_and_an_emptier_cache_comes_first() -> None:
    policy = PrefixAware()
    three = [load(name) for name in "abc"]
    assert Counter(policy.choose(three, QUERY).replica_id for _ in range(9)) == {"a": 3, "b": 3, "c": 3}
    assert choose([load("a", indexed_blocks=900), load("b", indexed_blocks=100)]) == "b"


def test_hot_prefix_leaves_a_home_with_twice_the_mean_load() -> None:
    """Even if the cached prefix is worth more than the load costs."""
    cached = {"a": PrefixMatch(99)}
    quick: dict[str, Any] = {"decode_step_s": 1e-6, "max_num_seqs": 40}
    others = [load(name, num_running=4, **quick) for name in "bcd"]
    assert choose([load("a", num_running=11, **quick), *others], cached) == "a"
    assert choose([load("a", num_running=20, **quick), *others], cached) != "a"
    assert choose([load("a", num_running=2000, **quick)], cached) == "a"  # nobody else is there


def test_siblings_stay_together_while_rows_are_free() -> None:
    """An agent's steps come all at once, to a replica that has few other requests."""
    cached = {"a": PrefixMatch(95)}
    others = [load(name, num_running=1) for name in "bcdefgh"]
    for running in range(1, 30):
        assert choose([load("a", num_running=running, decode_step_s=1e-6), *others], cached) == "a"
    assert choose([load("a", num_running=40, decode_step_s=1e-6), *others], cached) != "a"  # of max_num_seqs = 128


def test_a_burst_of_one_prefix_is_shared_out_by_its_queue() -> None:
    """Nothing reported in between: what was routed counts, so a home takes as many as pay off, and then others do."""
    from app.deployments.routing.load_book import LoadBook
    from app.deployments.routing.prefix_index import PrefixIndex

    now = [0.0]
    book = LoadBook(create_policy("prefix_aware"), lambda: now[0], PrefixIndex())
    for name in "abcd":
        book.report(load(name).report)
    hashes = tuple(i.to_bytes(16, "little") for i in range(1, 101))
    query = RouteQuery(1605, 100, hashes)
    first = book.route(query)
    assert first is not None
    counts = Counter(decision.replica_id for _ in range(60) if (decision := book.route(query)) is not None)
    assert counts[first.replica_id] >= 2  # siblings follow before any event has come
    assert len(counts) >= 2
    assert max(counts.values()) <= 60 / 4 + OVERLOAD_SHARE * 128 + 1


def test_an_adapter_goes_where_it_lies_or_where_a_slot_is_free() -> None:
    policy, query = create_policy("prefix_aware"), RouteQuery(100, 10, adapter="aa")

    def with_adapters(name: str, *running: str, **fields: Any) -> ReplicaLoad:
        return load(name, adapters=AdapterState(num_slots=2, running=running), **fields)

    taken, free, here = with_adapters("a", "bb", "cc"), with_adapters("b", "bb"), with_adapters("c", "aa", "bb")
    for _ in range(3):
        assert policy.choose([taken, free, here], query).replica_id == "c"
        assert policy.choose([taken, free], query).replica_id == "b"
    costs = policy.costs([taken, free, here], query)
    assert costs["a"].adapter_s > costs["b"].adapter_s > costs["c"].adapter_s == 0.0
    assert {cost.adapter_s for cost in policy.costs([taken, free], RouteQuery(100, 10)).values()} == {0.0}
    busy = with_adapters("c", "aa", queued_prefill_tokens=100_000)
    assert policy.choose([free, busy], query).replica_id == "b", "a long queue costs more than a copy"


def test_an_adapter_on_disk_costs_what_reads_have_taken_there() -> None:
    policy, query = create_policy("prefix_aware"), RouteQuery(100, 10, adapter="aa")
    near, far = (
        load(name, adapters=AdapterState(num_slots=2, on_disk=on_disk, read_s=1.5))
        for name, on_disk in (("near", ("bb",)), ("far", ("aa", "bb")))
    )
    costs = policy.costs([near, far], query)
    assert costs["far"].adapter_s == pytest.approx(costs["near"].adapter_s + 1.5)
    assert policy.choose([near, far], query).replica_id == "near"


def test_equal_keys_stay_together_within_the_bound() -> None:
    policy = create_policy("session_affinity")
    loads = [load(f"r{i}", num_running=10) for i in range(8)]
    homes = {}
    for key in range(200):
        query = RouteQuery(100, 10, session=f"s{key}")
        homes[key] = policy.choose(loads, query).replica_id
        assert policy.choose(loads, query).replica_id == homes[key]
    spread = Counter(homes.values())
    assert len(spread) == 8
    assert max(spread.values()) < 60
    fewer = loads[:-1]  # a replica has gone: only its own keys move
    for key, home in homes.items():
        query = RouteQuery(100, 10, session=f"s{key}")
        if home != "r7":
            assert policy.choose(fewer, query).replica_id == home
    busy = [load("r0", num_running=60), *loads[1:]]
    mine = next(key for key, home in homes.items() if home == "r0")
    assert policy.choose(busy, RouteQuery(100, 10, session=f"s{mine}")).replica_id != "r0"


def test_without_a_key_load_decides() -> None:
    loads = [load("a", routed_tokens=500), load("b")]
    assert create_policy("session_affinity").choose(loads, RouteQuery(100, 10)).replica_id == "b"
    by_prefix = [
        create_policy("session_affinity").choose(loads, RouteQuery(100, 10, (bytes([i]) * 16,))).replica_id
        for i in range(40)
    ]
    assert set(by_prefix) == {"a", "b"}  # the first block stands for the session
