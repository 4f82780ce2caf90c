"""When a replica asks itself, and what follows from no answer."""

from __future__ import annotations

from app.deployments.replica.canary import Canary
from app.errors import EngineDeadError
from app.records.request import CANARY_TENANT, MAX_PRIORITY, EngineRequest


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_only_a_silent_replica_asks_and_only_once() -> None:
    clock, sent = Clock(), list[EngineRequest]()
    canary = Canary(5.0, sent.append, clock=clock)
    for _ in range(20):  # busy: outputs all the time
        clock.now += 1.0
        canary.postpone()
        canary.tick()
    assert not sent
    for _ in range(14):  # silent
        clock.now += 1.0
        canary.tick()
    (request,) = sent
    assert request.placement.tenant == CANARY_TENANT
    assert request.placement.priority == MAX_PRIORITY
    assert request.max_tokens == 1
    assert canary.answers
    clock.now += 2.0
    assert not canary.answers
    assert canary.age_s == 16.0
    canary.postpone()
    assert canary.answers
    clock.now += 5.0
    canary.tick()
    assert len(sent) == 2
    assert sent[0].request_id != sent[1].request_id


def test_off() -> None:
    clock, sent = Clock(), list[EngineRequest]()
    canary = Canary(0.0, sent.append, clock=clock)
    clock.now += 1000.0
    canary.tick()
    assert not sent
    assert canary.answers
    assert canary.age_s == 0.0


def test_a_long_interval_makes_nobody_unready() -> None:
    clock, sent = Clock(), list[EngineRequest]()
    canary = Canary(60.0, sent.append, clock=clock)
    clock.now += 61.0
    canary.tick()
    assert sent
    assert canary.answers


def test_an_engine_that_refuses_does_not_answer() -> None:
    clock = Clock()

    def refuse(request: EngineRequest) -> None:
        raise EngineDeadError("the engine is not running")

    canary = Canary(5.0, refuse, clock=clock)
    for _ in range(30):
        clock.now += 1.0
        canary.tick()
    assert not canary.answers
