"""The load book and the policies that choose from it."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from app.backends import ROUTING_POLICIES
from app.deployments.routing.load_book import REPORT_EXPIRES_S, LoadBook
from app.deployments.routing.policies import create_policy
from app.deployments.routing.policies.base import ReplicaLoad, RouteQuery
from app.deployments.routing.prefix_index import PrefixIndex
from app.errors import UnsupportedError
from app.records.block_hash import hash_blocks
from app.records.kv_events import EMPTY_PREFIX, KVEvent, KVEventBatch
from app.records.load_report import LoadReport

QUERY = RouteQuery(num_prompt_tokens=100, max_tokens=50)


def report(name: str, outstanding: int = 0, accepting: bool = True, incarnation: str = "1") -> LoadReport:
    return LoadReport("m", name, incarnation, accepting, 0, 0, outstanding, 64, 16, 0)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def make(policy: str = "least_outstanding_tokens") -> tuple[LoadBook, Clock]:
    clock = Clock()
    return LoadBook(create_policy(policy), clock), clock


def chosen(book: LoadBook, allowed: list[str] | None = None) -> str | None:
    decision = book.route(QUERY, allowed)
    return decision.replica_id if decision is not None else None


def outstanding(book: LoadBook) -> dict[str, int]:
    return {load.report.replica_id: load.outstanding_tokens for load in book.replicas()}


def test_empty_book_knows_nobody() -> None:
    book, _ = make()
    assert book.route(QUERY) is None


def test_routed_requests_count_until_a_report_covers_them() -> None:
    book, clock = make()
    book.report(report("a"))
    assert chosen(book) == "a"
    assert outstanding(book) == {"a": 150}
    clock.now += 0.01
    book.report(report("a", 0))  # may have been written before the request arrived
    assert outstanding(book) == {"a": 150}
    clock.now += 1
    book.report(report("a", 120))
    assert outstanding(book) == {"a": 120}


def test_a_bundle_counts_as_its_prompts_until_a_report_covers_it() -> None:
    book, clock = make()
    book.report(report("a"))
    book.route(replace(QUERY, num_prompts=5))
    book.route(QUERY)
    assert (book.load("a").num_requests, book.load("a").routed_tokens) == (6, 300)
    clock.now += 1
    book.report(report("a"))
    assert (book.load("a").num_requests, book.load("a").routed_tokens) == (0, 0)


def test_burst_between_reports_is_spread() -> None:
    book, _ = make()
    for name in "abc":
        book.report(report(name))
    assert Counter(chosen(book) for _ in range(30)) == {"a": 10, "b": 10, "c": 10}


def test_busy_replica_is_avoided() -> None:
    book, _ = make()
    book.report(report("a", 10_000))
    book.report(report("b", 0))
    assert {chosen(book) for _ in range(20)} == {"b"}
    assert chosen(book, ["a"]) == "a"
    assert book.route(QUERY, allowed=["x"]) is None


def test_silent_and_draining_replicas_vanish() -> None:
    book, clock = make()
    book.report(report("a"))
    book.report(report("b"))
    book.report(report("b", accepting=False))
    assert list(outstanding(book)) == ["a"]
    clock.now += REPORT_EXPIRES_S + 0.1
    assert book.replicas() == []


def test_new_incarnation_starts_clean() -> None:
    book, clock = make()
    book.report(report("a"))
    book.route(QUERY)
    clock.now += 0.01
    book.report(report("a", incarnation="2"))
    assert outstanding(book) == {"a": 0}


def test_round_robin_takes_turns() -> None:
    book, _ = make("round_robin")
    book.report(report("a", 10_000))
    book.report(report("b"))
    assert Counter(chosen(book) for _ in range(10)) == {"a": 5, "b": 5}


def test_power_of_two_never_takes_the_worst_of_three() -> None:
    policy = create_policy("power_of_two")
    loads = [ReplicaLoad(report(name, tokens)) for name, tokens in (("a", 0), ("b", 10), ("c", 1000))]
    drawn = Counter(policy.choose(loads, QUERY).replica_id for _ in range(600))
    assert drawn["c"] == 0
    assert 300 < drawn["a"] < 500  # two thirds of the pairs hold it
    assert policy.choose(loads[2:], QUERY).replica_id == "c"


def test_unknown_policy_lists_the_known_ones() -> None:
    with pytest.raises(UnsupportedError, match="round_robin"):
        create_policy("best")
    assert {"prefix_aware", "least_outstanding_tokens", "power_of_two", "round_robin"} <= set(ROUTING_POLICIES)


def test_the_state_that_a_bundle_leaves_is_its_first_prompts() -> None:
    index = PrefixIndex()
    book = LoadBook(create_policy("prefix_aware"), Clock(), index=index)
    book.report(report("a"))
    index.apply(KVEventBatch("a", "1", 0, [KVEvent("stored", "state", EMPTY_PREFIX)]))
    hashes = tuple(hash_blocks(b"key", b"root", list(range(48)), 16))
    book.route(RouteQuery(400, 1, hashes, num_prompts=8, num_hashed_tokens=49))
    assert index.match(hashes, Clock().now)["a"].device_blocks == 2  # not behind the last token but one
    book.route(RouteQuery(400, 1, hashes, num_prompts=8, num_hashed_tokens=50))
    assert index.match(hashes, Clock().now)["a"].device_blocks == 3
