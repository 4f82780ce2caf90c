"""The plan of a step waits until shortly before the one that runs ends."""

from __future__ import annotations

import pytest

from app.engine.scheduler.plan_time import LEAST_MARGIN_S, LEAST_WAIT_S, MOST_MARGIN_S, PlanTime

STEP_S = 0.010


def running(*, was_over: bool = False) -> PlanTime:
    """One step has ended at 1.0 s, and the next has begun."""
    plan_time = PlanTime()
    plan_time.send(0.99, is_long=False)
    plan_time.send(0.99, is_long=False)
    plan_time.take(1.0, STEP_S, was_over=was_over)
    return plan_time


def test_a_plan_waits_until_shortly_before_the_running_step_ends() -> None:
    assert running().spare_s(1.0, STEP_S) == pytest.approx(STEP_S - LEAST_MARGIN_S)
    assert running().spare_s(1.004, STEP_S) == pytest.approx(STEP_S - LEAST_MARGIN_S - 0.004)
    assert running().spare_s(1.5, STEP_S) == 0.0
    assert running().spare_s(1.0 + STEP_S - LEAST_MARGIN_S - LEAST_WAIT_S / 2, STEP_S) == 0.0
    assert running().spare_s(1.0, 0.0) == 0.0, "nobody knows how long the step takes"
    assert PlanTime().spare_s(1.0, STEP_S) == 0.0, "no step is out"


def test_no_plan_waits_behind_a_step_that_was_launched_late() -> None:
    """Its launches may have taken the host as long as the device computes: the device is nearly done with it."""
    plan_time = running(was_over=True)
    assert plan_time.spare_s(1.0, STEP_S) == 0.0
    plan_time.send(1.0, is_long=False)
    plan_time.take(1.0 + STEP_S, STEP_S, was_over=False)
    assert plan_time.spare_s(1.0 + STEP_S, STEP_S) > 0.0


def test_no_step_is_expected_to_take_longer_than_the_last_of_its_kind() -> None:
    plan_time = running()
    assert plan_time.spare_s(1.0, 5 * STEP_S) == pytest.approx(STEP_S - LEAST_MARGIN_S)
    plan_time.send(1.0, is_long=True)
    plan_time.take(1.0 + STEP_S, STEP_S, was_over=False)
    long = plan_time.spare_s(1.0 + STEP_S, 5 * STEP_S)
    assert long == pytest.approx(5 * STEP_S - LEAST_MARGIN_S), "the first that is long"


def test_a_step_that_follows_none_begins_when_it_is_sent() -> None:
    plan_time = running()
    plan_time.take(1.0 + STEP_S, STEP_S, was_over=True)
    plan_time.send(7.0, is_long=False)
    assert plan_time.spare_s(7.0, STEP_S) == pytest.approx(STEP_S - LEAST_MARGIN_S)


def margin_after(steps: int, *, late: bool, waits: bool = True) -> float:
    plan_time, now = running(), 1.0
    for _ in range(steps):
        if waits:
            plan_time._is_behind = False
            plan_time.spare_s(now, STEP_S)
        plan_time.send(now, is_long=False)
        now += STEP_S
        plan_time.take(now, STEP_S, was_over=late)
    return plan_time.margin_s


def test_the_margin_grows_while_steps_are_launched_late_for_it_and_only_then() -> None:
    grown = margin_after(10, late=True)
    assert grown > 1.3 * LEAST_MARGIN_S
    assert margin_after(1000, late=True) <= MOST_MARGIN_S
    assert margin_after(10, late=True, waits=False) == LEAST_MARGIN_S, "it was not the wait"
    assert margin_after(1000, late=False) == LEAST_MARGIN_S


def test_an_output_of_no_step_is_none() -> None:
    plan_time = PlanTime()
    plan_time.take(1.0, STEP_S, was_over=False)
    assert plan_time.spare_s(1.0, STEP_S) == 0.0
