"""Tenants and classes share the engine's work out among them: deficit round robin, judged by sums of tokens."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from app.engine.scheduler.queue_load import WorkCosts
from app.engine.scheduler.waiting_queue import QUANTUM_TOKENS, WaitingQueue
from app.records.request import EngineRequest, Placement, ServiceClass
from app.records.request_state import Request, RequestStatus
from app.records.sampling_params import SamplingParams

SHARES = {"interactive": 0.6, "default": 0.3, "bulk": 0.1}


def request(key: int, tenant: str, tokens: int, service_class: str = "default") -> Request:
    placement = Placement(tenant=tenant, service_class=ServiceClass(service_class, SHARES[service_class]))
    made = Request(
        EngineRequest(f"r{key}", [], SamplingParams(), placement=placement),
        *([1] * tokens, tokens, tokens + 1, (), frozenset(), b""),
    )
    made.key = key
    return made


def serve(queue: WaitingQueue, tokens: float) -> list[Request]:
    """Requests in the order of service, until so many tokens were served."""
    served: list[Request] = []
    while tokens > 0 and len(queue):
        first = next(iter(queue))
        queue.take(first)
        first.status = RequestStatus.RUNNING
        served.append(first)
        tokens -= first.num_tokens
    return served


def jain(values: list[float]) -> float:
    """Jain's index of fairness: 1 when all are equal, 1/n when one has everything."""
    return sum(values) ** 2 / (len(values) * sum(value * value for value in values))


def tokens_of(served: list[Request]) -> Counter[str]:
    counts: Counter[str] = Counter()
    for one in served:
        counts[one.spec.placement.tenant] += one.num_tokens
    return counts


def test_a_flood_of_one_tenant_takes_no_more_than_its_share() -> None:
    """One sends a hundred times as many requests, another ones of a hundred times the size."""
    rng, queue, key = random.Random(0), WaitingQueue(), 0
    for _ in range(2000):
        queue.push(request(key := key + 1, "hostile", rng.randint(1, 400)))
    for _ in range(20):
        queue.push(request(key := key + 1, "long", rng.randint(4000, 6000)))
    for tenant in ("a", "b", "c"):
        for _ in range(600):
            queue.push(request(key := key + 1, tenant, rng.randint(50, 200)))
    counts = tokens_of(serve(queue, 200_000))
    assert jain([counts[name] for name in ("hostile", "long", "a", "b", "c")]) > 0.99, counts
    assert max(counts.values()) - min(counts.values()) <= 6000 + 2 * QUANTUM_TOKENS, "DRR's bound: a request, quanta"


def test_classes_get_their_shares_and_what_others_leave() -> None:
    queue, key = WaitingQueue(), 0
    for name in SHARES:
        for _ in range(2000):
            queue.push(request(key := key + 1, name, 100, name))
    counts = tokens_of(serve(queue, 100_000))
    for name, share in SHARES.items():
        assert counts[name] == pytest.approx(share * 100_000, abs=3000)
    alone = WaitingQueue()
    for i in range(50):
        alone.push(request(i, "t", 100, "bulk"))
    assert len(serve(alone, 1e9)) == 50, "work-conserving"


def test_who_was_idle_gets_no_more_than_who_was_not() -> None:
    queue, key = WaitingQueue(), 0
    for _ in range(1000):
        queue.push(request(key := key + 1, "busy", 100))
    serve(queue, 50_000)
    for _ in range(1000):
        queue.push(request(key := key + 1, "idle", 100))
    counts = tokens_of(serve(queue, 20_000))
    assert abs(counts["busy"] - counts["idle"]) <= 2 * QUANTUM_TOKENS


def test_small_requests_come_in_the_order_of_arrival_whosever_they_are() -> None:
    queue = WaitingQueue()
    mixed = [request(i, "abc"[i % 3], 10) for i in range(30)]
    for one in mixed:
        queue.push(one)
    assert list(queue) == mixed


def test_iteration_is_the_order_in_which_all_would_be_served() -> None:
    for seed in range(20):
        rng, queues = random.Random(seed), (WaitingQueue(), WaitingQueue())
        for key in range(80):
            tenant, size, name = rng.choice("abcd"), rng.randint(1, 3000), rng.choice(list(SHARES))
            for queue in queues:
                queue.push(request(key, tenant, size, name))
        foretold = [one.key for one in queues[0]]
        assert foretold == [one.key for one in serve(queues[1], 1e9)]


def test_what_an_answer_was_longer_than_expected_its_tenant_pays_later() -> None:
    queue, key = WaitingQueue(lambda one: 0, lambda: 10.0), 0
    for _ in range(400):
        for tenant in ("talks", "terse"):
            queue.push(request(key := key + 1, tenant, 100))
    counts: Counter[str] = Counter()
    for _ in range(500):
        first = next(iter(queue))
        queue.take(first)
        tenant = first.spec.placement.tenant
        generated = 300 if tenant == "talks" else 10
        first.token_ids += [1] * generated
        counts[tenant] += 100 + generated
        queue.settle(first)
    assert jain(list(map(float, counts.values()))) > 0.99, counts


def test_a_request_that_returns_goes_first_and_is_charged_once() -> None:
    queue = WaitingQueue()
    first, second = request(1, "a", 5000), request(2, "b", 10)
    queue.push(first)
    (taken,) = serve(queue, 1)
    taken.status = RequestStatus.PREEMPTED
    queue.push(second)
    queue.push(taken)
    assert list(queue) == [first, second]
    queue.take(first)
    queue.settle(first)
    queue.take(second)
    queue.settle(second)
    assert not len(queue)
    turns = queue._classes["default"]
    assert turns.num_running == 0
    assert not turns._tenants, "nothing is kept of tenants that left"


COSTS = WorkCosts(1e-3, 1e-2)


def rates(queue: WaitingQueue, num_rows: int) -> dict[str, float]:
    return {one.tenant: one.rate for one in queue.queued(COSTS, num_rows)}


def test_until_its_rate_is_measured_a_tenant_counts_on_its_part_among_those_who_come() -> None:
    queue, key = WaitingQueue(), 0
    for tenant in ("a", "b", "c", "d"):
        queue.push(request(key := key + 1, tenant, 100))
    served = serve(queue, 300)
    for _ in range(3):
        queue.push(request(key := key + 1, "d", 100))
    assert rates(queue, 4) == {"d": 0.25}, "the three others run in four rows: they will go on coming"
    assert rates(queue, 100)["d"] == pytest.approx(1 - (3 + 2 * 3**0.5) / 100), "in a hundred that is little"
    queue.push(request(key := key + 1, "a", 100))
    assert rates(queue, 1000) == pytest.approx({"a": 0.5, "d": 0.5}, abs=0.01), "who waits takes as much"
    queue.push(request(key := key + 1, "e", 100, "interactive"))
    assert rates(queue, 1000) == pytest.approx({"a": 1 / 6, "d": 1 / 6, "e": 2 / 3}, abs=0.01), "so do classes"
    for one in served:
        queue.settle(one)
    assert sum(rates(queue, 4).values()) == pytest.approx(1.0)


def test_what_was_measured_counts() -> None:
    queue = WaitingQueue()
    for key in range(5):
        queue.push(request(key, "a", 100), now=0.0)
    first = next(iter(queue))
    queue.load.note_start(first, WorkCosts(3e-3, 0.0), 100, 1.5)
    assert rates(queue, 8) == {"a": pytest.approx(0.2)}
