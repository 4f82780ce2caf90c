"""Autoscaling policies over simulated fleets: no request is lost, each policy does what it says, and ours pays."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from app.records.stats import EngineStats
from loadtest import autoscale
from loadtest.simulation.arrivals import RATES, create_load
from loadtest.simulation.scaled_fleet import ScaledFleet
from loadtest.simulation.scalers import Moment, QueueRule, Schedule, ServeDefault

ZEROS = dict.fromkeys(EngineStats.__dataclass_fields__, 0)


def moment(now_s: float, target: int, num_requests: int, num_waiting: int = 0) -> Moment:
    stats = EngineStats(**{**ZEROS, "num_running": num_requests, "num_waiting": num_waiting, "num_blocks": 1})  # type: ignore[arg-type]
    idle = EngineStats(**{**ZEROS, "num_blocks": 1})  # type: ignore[arg-type]
    running = {str(i): stats if i == 0 else idle for i in range(target)}
    return Moment(now_s, target, running, 0 if target else num_requests, 0)


@pytest.mark.parametrize("name", RATES)
def test_no_request_is_lost_while_replicas_come_and_go(name: str) -> None:
    trace = create_load(name, 2.0, 120.0, seed=1)
    numbers = [1 + second // 10 % 3 for second in range(200)] + [1]
    fleet = ScaledFleet(Schedule(numbers), 1, 5.0, autoscale.NUM_BLOCKS, autoscale.SPEEDS)
    fleet.run(trace, 120.0)
    assert all(request.sent_s < request.first_token_s <= request.ended_s for request in trace)
    assert fleet.num_turns > 5
    assert fleet.most == 3


def test_a_replica_costs_from_the_moment_it_is_asked_for_and_serves_a_cold_start_later() -> None:
    trace = create_load("step", 1.0, 60.0, seed=2)
    fleet = ScaledFleet(Schedule([0] * 20 + [1]), 0, 30.0, autoscale.NUM_BLOCKS, autoscale.SPEEDS)
    fleet.run(trace, 60.0)
    assert min(request.first_token_s for request in trace) > 50.0
    assert fleet.replica_s == pytest.approx(fleet.now - 20.0, abs=2.0)


def test_serves_own_policy_is_called_with_its_own_delays() -> None:
    """Its documentation: 2 ongoing requests a replica, up after 30 s, down after 600 s."""
    scaler, target, ups = ServeDefault(min_replicas=1, max_replicas=10), 1, []
    for second in range(1000):
        before, target = target, scaler.target(moment(float(second), target, 8 if second < 200 else 0))
        ups += [(second, target)] * (target != before)
    assert ups[0][1] == 4
    assert 30 <= ups[0][0] <= 45
    assert ups[-1][1] == 1
    assert 800 <= ups[-1][0] <= 860


def test_the_queue_rule_follows_what_waits_and_lets_go_late() -> None:
    rule, target = QueueRule(1, 10, threshold=5), 1
    target = rule.target(moment(0.0, target, 3, num_waiting=20))
    assert target == 4
    for second in range(1, 400):
        before, target = target, rule.target(moment(float(second), target, 3))
        if target != before:
            assert second > 300
    assert target == 1


def test_the_command_writes_a_table_in_which_ours_scales(tmp_path: Path) -> None:
    out = tmp_path / "autoscale"
    arguments = ["--trace", "step", "--policy", "Manta", "fixed 3", "--length-s", "300", "--out", str(out)]
    ours, fixed = autoscale.main(arguments)
    assert (ours.policy, fixed.policy) == ("Manta", "fixed 3")
    assert ours.most_replicas > 1
    assert (fixed.most_replicas, fixed.num_scalings) == (3, 0)
    written = json.loads(out.with_suffix(".json").read_text())
    assert [cell["policy"] for cell in written["cells"]] == ["Manta", "fixed 3"]
    assert out.with_suffix(".md").read_text().count("\n| step |") == 2
