"""The table of fleet calls beside the engine's own; test_fleet.py plays them."""

from __future__ import annotations

from typing import Any

import pytest

from app.deployments.admin.fleet_calls import FLEET_CALLS
from app.deployments.admin.fleet_state import FleetState
from app.engine.control import CONTROLS
from app.records.engine_state import TAGS

ASLEEP = FleetState(sleep_level=2, asleep=frozenset(TAGS))


def test_each_line_is_a_control_call() -> None:
    checks = {line.check for line in FLEET_CALLS.values() if line.check}
    assert FLEET_CALLS.keys() | checks <= set(CONTROLS)


@pytest.mark.parametrize(
    ("name", "arguments", "before", "after"),
    [
        ("pause", {}, FleetState(), FleetState(is_paused=True)),
        ("resume", {}, FleetState(is_paused=True), FleetState()),
        ("sleep", {"level": 2}, FleetState(), ASLEEP),
        ("sleep", {}, ASLEEP, ASLEEP),
        ("wake_up", {"tags": ["kv_cache"]}, ASLEEP, FleetState(sleep_level=2, asleep=frozenset({"weights"}))),
        ("wake_up", {}, ASLEEP, FleetState(sleep_level=2, weights_missing=True)),
        ("wake_up", {}, FleetState(sleep_level=1, asleep=frozenset(TAGS)), FleetState()),
        ("update_weights", {"path": "/x"}, FleetState(), FleetState(weights="/x", revision="r")),
        ("reload_weights", {}, FleetState(sleep_level=2, weights_missing=True, weights="/x"), FleetState()),
        ("start_weight_update", {}, FleetState(), FleetState()),
        ("finish_weight_update", {}, FleetState(weights="/x"), FleetState(revision="r", is_sent=True)),
    ],
)
def test_what_comes_of_a_call(name: str, arguments: dict[str, Any], before: FleetState, after: FleetState) -> None:
    assert FLEET_CALLS[name].after(before, arguments, "r") == after
