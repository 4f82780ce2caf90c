"""The plan of a step waits until shortly before the one that runs ends."""

from __future__ import annotations

import pytest

from app.engine.scheduler.plan_time import LEAST_MARGIN_S, MARGIN_S, MOST_MARGIN_S, PlanTime

STEP_S = 0.010


def running(*, is_long: bool = False, took_s: float = STEP_S) -> PlanTime:
    """One step has ended at 1.0 s, and the next has begun."""
    plan_time = PlanTime()
    plan_time.send(1.0 - took_s, is_long=is_long)
    plan_time.send(1.0 - took_s, is_long=is_long)
    plan_time.take(1.0, took_s)
    return plan_time


def test_a_plan_waits_until_shortly_before_the_running_step_ends() -> None:
    assert running().spare_s(1.0, STEP_S) == pytest.approx(STEP_S - MARGIN_S)
    assert running().spare_s(1.004, STEP_S) == pytest.approx(STEP_S - MARGIN_S - 0.004)
    assert running().spare_s(1.5, STEP_S) == 0.0
    assert running().spare_s(1.0, 0.0) == 0.0, "nobody knows how long the step takes"
    assert PlanTime().spare_s(1.0, STEP_S) == 0.0, "no step is out"


def test_no_step_is_expected_to_take_longer_than_the_last_of_its_kind() -> None:
    plan_time = running()
    assert plan_time.spare_s(1.0, 5 * STEP_S) == pytest.approx(STEP_S - MARGIN_S)
    plan_time.send(1.0, is_long=True)
    plan_time.take(1.0 + STEP_S, STEP_S)
    assert plan_time.spare_s(1.0 + STEP_S, 5 * STEP_S) == pytest.approx(5 * STEP_S - MARGIN_S), "the first that is long"


def test_a_step_that_follows_none_begins_when_it_is_sent() -> None:
    plan_time = running()
    plan_time.take(1.0 + STEP_S, STEP_S)
    plan_time.send(7.0, is_long=False)
    assert plan_time.spare_s(7.0, STEP_S) == pytest.approx(STEP_S - MARGIN_S)


def margin_after(late_s: float, steps: int, *, waits: bool = True) -> float:
    """Steps whose outputs come so much later than they could."""
    plan_time, now = running(), 1.0
    for _ in range(steps):
        if waits:
            plan_time.spare_s(now, STEP_S)
        plan_time.send(now, is_long=False)
        now += STEP_S + late_s
        plan_time.take(now, STEP_S)
    return plan_time.margin_s


def test_the_margin_grows_while_steps_begin_later_for_it_and_only_then() -> None:
    assert margin_after(0.001, 10) > 1.3 * MARGIN_S
    assert margin_after(0.001, 1000) <= MOST_MARGIN_S
    assert margin_after(0.001, 10, waits=False) == MARGIN_S, "it was not the wait"
    assert LEAST_MARGIN_S < margin_after(0.0, 100) < MARGIN_S
    assert margin_after(0.0, 10000) == LEAST_MARGIN_S


def test_an_output_of_no_step_is_none() -> None:
    plan_time = PlanTime()
    plan_time.take(1.0, STEP_S)
    assert plan_time.spare_s(1.0, STEP_S) == 0.0
