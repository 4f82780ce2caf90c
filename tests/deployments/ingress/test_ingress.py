"""What an ingress replica tells of the models behind it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from app.deployments.ingress import Ingress
from app.telemetry.metrics import MetricsRecorder, decode_snapshot


@pytest.mark.parametrize(("num_live", "may_sleep", "down"), [(1, False, 0), (0, False, 1), (0, True, 0)])
def test_a_model_that_may_sleep_is_not_down_without_a_replica(num_live: int, may_sleep: bool, down: int) -> None:
    """Scaled to zero on purpose it raised MantaNoLiveReplica, which calls somebody out of bed."""
    ingress = SimpleNamespace(
        _recorder=MetricsRecorder({"ingress": "i"}, scope="ingress"),
        _num_requests=0,
        _pools={"m": SimpleNamespace(live=lambda: ["channel"] * num_live, num_lost=0)},
        _may_sleep={"m": may_sleep},
        _waiting_rooms={},
    )
    told = decode_snapshot(Ingress._snapshot(cast(Any, ingress))).values
    assert told["manta:ingress_model_down"] == {("m",): down}
    assert told["manta:ingress_channels"] == {(): num_live}
