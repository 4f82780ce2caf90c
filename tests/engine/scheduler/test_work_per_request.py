"""What a request costs the engine's thread hardly grows with how many wait; priorities deal the same order as ever."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from types import FrameType
from typing import Any

import pytest

from app.engine.core import EngineCore
from app.records.request import Deadline, EngineRequest, Placement
from app.records.request_state import Request
from tests.engine.core_driver import assert_idle, make_core, make_request, run

FEW, MANY = 100, 1600


def calls_of(work: Callable[[], Any]) -> int:
    """How many functions are called, generators resumed and built-ins called: a measure without a clock."""
    count = 0

    def note(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


def request_of(tenant: str, request_id: str, priority: int) -> EngineRequest:
    made = make_request(request_id, [1, 2, 3], max_tokens=50)
    return replace(made, placement=Placement(priority, tenant=tenant))


def crowded(num_waiting: int, policy: str, **options: Any) -> EngineCore:
    """A core with all rows taken, and so many requests that wait, of a few tenants."""
    rng = random.Random(num_waiting)
    core = make_core(num_blocks=64, max_num_seqs=4, scheduling_policy=policy, **options)
    for number in range(num_waiting):
        core.add_request(request_of(f"t{number % 3}", f"r{number}", rng.randrange(9)))
        if number < 8:
            core.step()
    return core


WORKS: dict[str, Callable[[EngineCore], Any]] = {
    "add": lambda core: core.enqueue(core.prepare(request_of("t1", "new", 4))),
    "abort one that waits": lambda core: core.abort_requests(["r50"]),
    "abort one that runs": lambda core: core.abort_requests([core.scheduler.rows.occupants()[0].request_id]),
    "hold": lambda core: core.pause("r60"),
    "let go": lambda core: (core.pause("r60"), core.resume("r60")),
    "step": lambda core: core.step(),
    "deadlines": lambda core: core.end_late_requests(),
}


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("name", WORKS)
def test_it_hardly_grows_with_what_waits(name: str, policy: str) -> None:
    few, many = (crowded(count, policy) for count in (FEW, MANY))
    work = WORKS[name]
    assert calls_of(lambda: work(many)) < 1.5 * calls_of(lambda: work(few)) + 100


def test_a_step_looks_behind_no_crowd_that_is_held() -> None:
    def cost(num_waiting: int) -> int:
        core = crowded(num_waiting, "fcfs")
        for number in range(20, num_waiting):
            core.pause(f"r{number}")
        return calls_of(core.step)

    assert cost(MANY) < 1.5 * cost(FEW) + 100


def test_who_is_held_has_its_place_again() -> None:
    core = make_core(num_blocks=500, max_num_seqs=1)
    for number in range(6):
        core.add_request(make_request(f"r{number}", [number] * 3, max_tokens=3))
    core.pause("r2")
    core.pause("r4")
    core.abort_requests(["r4"])

    def let_go(step: int) -> None:
        if step == 1:
            core.resume("r2")

    assert run(core, each_step=let_go).order == ["r4", "r0", "r1", "r2", "r3", "r5"]
    assert_idle(core)


def dealt_anew(requests: list[Request], keys: dict[str, int], new: Request) -> None:
    """The judge: with each request that comes, all keys of its tenant's and class's are collected, sorted and dealt."""
    whose = new.spec.placement.tenant, new.spec.placement.service_class.name
    own = [one for one in requests if (one.spec.placement.tenant, one.spec.placement.service_class.name) == whose]
    own.sort(key=lambda one: (one.spec.placement.priority, keys[one.request_id]))
    for one, key in zip(own, sorted(keys[one.request_id] for one in own), strict=True):
        keys[one.request_id] = key


@pytest.mark.parametrize("seed", range(4))
def test_priorities_deal_the_same_order_as_a_sort_with_each_request(seed: int) -> None:
    rng = random.Random(seed)
    core = make_core(num_blocks=4000, max_num_seqs=3, scheduling_policy="priority")
    live, keys = core.scheduler.requests, dict[str, int]()
    for number in range(1, 300):
        if rng.random() < 0.6:
            made = make_request(f"r{number}", [1] * rng.randint(1, 9), max_tokens=rng.randint(1, 6))
            placement = Placement(rng.choice([-1, 0, 0, 3]), tenant=rng.choice("ab"))
            core.add_request(replace(made, placement=placement))
            keys[made.request_id] = live[made.request_id].number
            dealt_anew(list(live.values()), keys, live[made.request_id])
        elif live and rng.random() < 0.3:
            core.abort_requests([rng.choice(list(live))])
        else:
            core.step()
        assert {name: one.rank for name, one in live.items()} == {name: keys[name] for name in live}
    run(core)
    assert_idle(core)


def test_nothing_is_kept_of_tenants_whose_requests_have_ended() -> None:
    core = crowded(40, "priority", enable_prefix_caching=False)
    assert len(core.scheduler._ranks._ranks) == 3
    run(core)
    assert not core.scheduler._ranks._ranks
    assert_idle(core)


def test_many_that_are_late_at_once_cost_each_its_own() -> None:
    core = make_core(num_blocks=64, max_num_seqs=4, scheduling_policy="priority")
    for number in range(400):
        made = make_request(f"r{number}", [1, 2, 3], priority=number % 7)
        placement = replace(made.placement, deadline=Deadline(1e-9, until_first_token=False))
        core.add_request(replace(made, placement=placement, arrival_time=time.time()))
    count = calls_of(core.end_late_requests)
    assert not core.scheduler.requests
    assert count < 400 * 150
