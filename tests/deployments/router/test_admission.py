"""Who is let in: waits against those of a queue that is served as fairly, step by step."""

from __future__ import annotations

import math
import random
from itertools import count

import pytest

from app.config.admission import AdmissionConfig, ClassConfig
from app.deployments.router.admission import MOST_RETRY_AFTER_S, Admission
from app.deployments.router.queue_wait import QueueWait
from app.deployments.router.retry_budget import RetryBudget
from app.deployments.routing.claim import Claim, Rejection, Wait
from app.deployments.routing.load_book import LoadBook
from app.deployments.routing.policies import create_policy
from app.deployments.routing.policies.base import Decision, ReplicaLoad, RouteQuery
from app.records.load_report import LoadReport
from app.records.request import ServiceClass
from app.records.stats import QueuedWork

QUERY = RouteQuery(num_prompt_tokens=1000, max_tokens=100)  # 1 s of prefill; 100 of its decode steps take 2 s
SHARES = {"interactive": 0.6, "default": 0.3, "bulk": 0.1}


def report(name: str = "a", *queued: QueuedWork, rate: float = 1.0, running: int = 4) -> LoadReport:
    waiting = 10 if queued else 0
    tokens = ("m", name, "1", True, running, waiting, 0, 1000, 16, 0)
    return LoadReport(*tokens, max_num_seqs=4, prefill_token_s=1e-3, decode_step_s=0.02, queued=queued, begun_rate=rate)


def queue(tenant: str, work_s: float, name: str = "default", rate: float = 0.0) -> QueuedWork:
    return QueuedWork(name, SHARES[name], tenant, work_s, rate)


def claim(tenant: str = "me", name: str = "default", **more: object) -> Claim:
    return Claim(ServiceClass(name, SHARES[name]), tenant, **more)  # type: ignore[arg-type]


def make(*reports: LoadReport, **options: object) -> Admission:
    book = LoadBook(create_policy("prefix_aware"), lambda: 100.0)
    for one in reports:
        book.report(one)
    config = AdmissionConfig(**options)  # type: ignore[arg-type]
    return Admission(config, book, RetryBudget(config.retry_share, config.min_retries_per_s), random.Random(0))


def served_before(queues: dict[tuple[str, str], float], mine: tuple[str, str], own_s: float) -> float:
    """Work that is served before mine ends, less mine: a fair queue, a thousandth of a second after the other."""
    left, done, quantum = {**queues, mine: queues.get(mine, 0.0) + own_s}, 0.0, 1e-3
    while left[mine] > 1e-9:
        classes = {name for (name, _), work in left.items() if work > 1e-9}
        for name in classes:
            tenants = [key for key, work in left.items() if key[0] == name and work > 1e-9]
            for key in tenants:
                piece = min(left[key], quantum * SHARES[name] / len(tenants))
                left[key] -= piece
                done += piece
    return done - own_s


@pytest.mark.parametrize("seed", range(6))
def test_the_wait_is_that_of_a_queue_which_is_served_fairly(seed: int) -> None:
    rng = random.Random(seed)
    queues = {(name, tenant): rng.uniform(0, 6) for name in SHARES for tenant in rng.sample("abcde", rng.randint(0, 4))}
    load = ReplicaLoad(report("a", *(queue(tenant, work, name) for (name, tenant), work in queues.items())))
    own_s = QueueWait(load)._work_s(1000, 100)
    for name in SHARES:
        for tenant in ("a", "new"):
            expected = served_before(queues, (name, tenant), own_s) if queues else 0.0
            assert QueueWait(load).wait_s(claim(tenant, name), 1000, 100) == pytest.approx(expected, rel=0.02, abs=0.05)


def test_of_a_bundle_waits_what_its_prompts_would_wait_one_by_one() -> None:
    """Those that have rows do not wait."""
    waits = []
    for num_queries, num_prompts in ((1, 8), (8, 1), (2, 4)):
        book = make(report(running=0))._book
        query = RouteQuery(800 // num_queries, 80 // num_queries, num_prompts=num_prompts)
        for _ in range(num_queries):
            book.count_request("a", query, claim=claim("other"))
        waits.append(QueueWait(book.load("a")).total_s())
    assert waits == pytest.approx([waits[0]] * 3)
    assert waits[0] > 0


def test_it_runs_off_at_the_rate_that_the_engine_measures() -> None:
    slow = QueueWait(ReplicaLoad(report("a", queue("x", 10.0), queue("me", 10.0), rate=0.5)))
    fast = QueueWait(ReplicaLoad(report("a", queue("x", 10.0), queue("me", 10.0), rate=1.0)))
    assert slow.wait_s(claim(), 1000, 100) == pytest.approx(2 * fast.wait_s(claim(), 1000, 100))
    mine = QueueWait(ReplicaLoad(report("a", queue("me", 10.0, rate=0.2))))
    own_s = mine._work_s(1000, 100)
    assert mine.wait_s(claim(), 1000, 100) == pytest.approx(1.6 * (10.0 + own_s) / 0.2), (
        "others come and take their share"
    )
    alone = QueueWait(ReplicaLoad(report("a", queue("me", 10.0, rate=1.0), rate=1.0)))
    assert alone.wait_s(claim(), 1000, 100) == pytest.approx(10.0 + own_s), "nobody takes any"


def test_nothing_is_refused_where_nothing_waits() -> None:
    admission = make(report(running=2), default=ClassConfig(share=0.3, max_wait_s=1e-6))
    assert isinstance(admission.answer(QUERY, claim()), Decision)


def test_a_wait_longer_than_the_class_allows_is_refused_and_says_when_to_come_again() -> None:
    options = {"default": ClassConfig(share=0.3, max_wait_s=5.0)}
    for mine, others, reason in ((20.0, 1.0, "tenant"), (10.0, 12.0, "server")):
        admission = make(report("a", queue("me", mine), queue("x", others)), **options)
        answer = admission.answer(QUERY, claim())
        assert isinstance(answer, Rejection)
        assert answer.reason == reason
        assert 0.8 * answer.wait_s <= answer.retry_after_s <= 1.2 * answer.wait_s
    others_say = make(report("a", queue("hostile", 20.0)), **options).answer(QUERY, claim())
    assert isinstance(others_say, Decision), "a tenant that has nothing waiting has its turn soon"
    endless = make(report("a", queue("me", 1e6)), **options).answer(QUERY, claim())
    assert isinstance(endless, Rejection)
    assert endless.retry_after_s == MOST_RETRY_AFTER_S


def test_the_deadline_counts_what_the_request_itself_takes() -> None:
    admission = make(report(running=0), default=ClassConfig(share=0.3, max_wait_s=None))
    assert isinstance(admission.answer(QUERY, claim(time_left_s=3.5)), Decision)  # 1 s of prefill, 2 s of decode
    assert isinstance(admission.answer(QUERY, claim(time_left_s=2.5)), Rejection)
    assert isinstance(admission.answer(QUERY, claim(time_left_s=2.5, until_first_token=True)), Decision)


def test_another_replica_takes_what_would_wait_too_long_at_the_first_choice() -> None:
    options = {"default": ClassConfig(share=0.3, max_wait_s=5.0)}
    full, free = report("a", queue("me", 20.0)), report("b", running=3)
    for _ in range(4):
        answer = make(full, free, **options).answer(QUERY, claim())
        assert isinstance(answer, Decision)
        assert answer.replica_id == "b"


def test_what_was_sent_since_the_last_report_waits_too() -> None:
    admission = make(report(running=3), default=ClassConfig(share=0.3, max_wait_s=20.0))
    taken = next(i for i in count() if isinstance(admission.answer(QUERY, claim()), Rejection))
    work_s = QueueWait(ReplicaLoad(report(running=4)))._work_s(1000, 100)  # of each; one found a row
    assert taken == pytest.approx(20.0 / work_s + 2, abs=2)


def test_a_request_that_goes_on_is_always_taken() -> None:
    admission = make(report("a", queue("me", 1e6)), min_retries_per_s=0.0)
    assert isinstance(admission.answer(QUERY, None), Decision)
    assert math.isclose(admission.queue_s("default"), 1e6, rel_tol=0.01)


def test_an_engine_that_has_measured_nothing_refuses_nothing() -> None:
    fresh = LoadReport("m", "a", "1", True, 4, 10, 0, 1000, 16, 0, max_num_seqs=4, queued=(queue("me", 0.0),))
    assert isinstance(make(fresh).answer(QUERY, claim(time_left_s=0.1)), Decision)


def test_retries_are_a_share_of_what_comes_first() -> None:
    now = [0.0]
    budget = RetryBudget(0.2, 3.0, lambda: now[0])
    assert sum(budget.take() for _ in range(100)) == 30, "three a second, of ten seconds"
    for _ in range(500):
        budget.count_first()
    assert sum(budget.take() for _ in range(300)) == 100
    now[0] = 11.0
    assert sum(budget.take() for _ in range(100)) == 30, "what came before counts no more"


def test_a_clients_retry_is_refused_and_a_replacement_of_ours_waits() -> None:
    admission = make(report(running=0), min_retries_per_s=0.0, retry_share=0.0)
    refused = admission.answer(QUERY, claim(is_retry=True))
    assert isinstance(refused, Rejection)
    assert refused.reason == "retry"
    assert isinstance(admission.answer(QUERY, claim(is_retry=True, may_wait=True)), Wait)
    assert isinstance(admission.answer(QUERY, claim()), Decision)
