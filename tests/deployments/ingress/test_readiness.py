"""What /ready goes by, and how a replica learns that Serve stops it."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.serve._private import replica as serve_replica

from app.deployments.ingress import readiness
from app.deployments.ingress.readiness import is_draining, why_not_ready


def pool(*answers: bool, held: str = "") -> Any:
    """A ReplicaPool with a live channel for each of `answers`."""
    live = {str(i): SimpleNamespace(load=SimpleNamespace(answers=one)) for i, one in enumerate(answers)}
    return SimpleNamespace(live=lambda: live, held=held)


def test_a_replica_of_each_model_that_answers() -> None:
    assert why_not_ready({"a": pool(True), "b": pool(False, True)}, is_full=False) is None
    assert why_not_ready({"a": pool(True), "b": pool()}, is_full=False) == "no replica of b takes requests"
    silent = why_not_ready({"a": pool(False, False), "b": pool(True)}, is_full=False)
    assert silent is not None
    assert silent.startswith("no replica of a has given an output lately")


def test_what_an_operator_holds_is_not_ready() -> None:
    why = why_not_ready({"a": pool(True), "b": pool(True, held="an operator has paused the engine")}, is_full=False)
    assert why == "requests to b wait: an operator has paused the engine"


def test_room_for_requests() -> None:
    assert "as many requests" in (why_not_ready({"a": pool(True)}, is_full=True) or "")


def test_a_stopping_replica_is_not_ready_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "out of service" in (why_not_ready({"a": pool(True)}, is_full=False, is_leaving=True) or "")
    monkeypatch.setattr(readiness, "is_draining", lambda: True)
    assert "out of service" in (why_not_ready({"a": pool(True)}, is_full=False) or "")


def test_serve_s_mark_is_found_in_the_replica_s_own_process(ray_cluster: str) -> None:
    """Ray keeps a process's actor where `is_draining` looks, and Serve's replicas hold the mark that it reads."""

    @ray.remote(num_cpus=0)
    class Actor:
        def __init__(self) -> None:
            self._replica_impl = SimpleNamespace(_shutting_down=False)

        async def asked(self, is_stopping: bool) -> bool:
            self._replica_impl._shutting_down = is_stopping
            return is_draining()

    actor = Actor.remote()
    assert [ray.get(actor.asked.remote(mark)) for mark in (False, True)] == [False, True]
    assert not is_draining(), "this process is no replica"
    assert "self._replica_impl" in inspect.getsource(serve_replica.ReplicaActor)
    assert "self._shutting_down = True" in inspect.getsource(serve_replica.Replica._perform_graceful_shutdown)
