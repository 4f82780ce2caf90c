"""The load of all replicas in three figures."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from app.deployments.ingress.load_figures import load_figures
from app.records.load_report import LoadReport


def pool(*loads: LoadReport | None) -> Any:
    """A ReplicaPool with a live channel for each of `loads`; None is one that has not reported."""
    live = {str(i): SimpleNamespace(load=one) for i, one in enumerate(loads)}
    return SimpleNamespace(live=lambda: live)


def report(running: int, waiting: int, resident: int, num_blocks: int = 10) -> LoadReport:
    return LoadReport("m", "r", "1", True, running, waiting, 0, num_blocks, 16, 0, resident_tokens=resident)


def test_replicas_add_up_and_the_fullest_model_counts() -> None:
    figures = load_figures([pool(report(1, 2, 16), report(3, 4, 48), None), pool(report(5, 0, 80, num_blocks=100))])
    assert figures == {"kv_cache_usage_perc": 0.2, "num_requests_waiting": 6.0, "num_requests_running": 9.0}


def test_without_replicas_nothing_is_used() -> None:
    assert set(load_figures([pool(), pool(None)]).values()) == {0.0}
    assert load_figures([pool(report(0, 0, 0, num_blocks=0))])["kv_cache_usage_perc"] == 0.0
