"""What an ingress learns from a broadcast of which not every part comes back."""

from __future__ import annotations

import asyncio
from typing import Any

from ray.serve.exceptions import DeploymentUnavailableError

from app.deployments.channel.replica_finder import Discovery
from app.deployments.channel.serve_port import EngineHandles
from app.records.load_report import LoadReport
from tests import limits


class Result:
    """One replica's part of a broadcast: an answer, an error, or None for a replica that hangs."""

    def __init__(self, answer: Any) -> None:
        self._answer = answer

    async def get_async(self) -> Any:
        if self._answer is None:
            await asyncio.Event().wait()
        if isinstance(self._answer, Exception):
            raise self._answer
        return self._answer


class Handle:
    """As much of a Serve handle as a broadcast needs."""

    def __init__(self, *answers: Any, error: Exception | None = None, stuck: bool = False) -> None:
        self._answers = answers
        self._error = error
        self._stuck = stuck

    def options(self, **_: Any) -> Handle:
        return self

    def broadcast(self, method: str, *args: Any) -> Handle:
        return self

    async def _fetch_replica_results_async(self) -> list[Result]:
        if self._error is not None:
            raise self._error
        if self._stuck:
            await asyncio.Event().wait()
        return [Result(answer) for answer in self._answers]


def report(name: str) -> LoadReport:
    return LoadReport("m", name, "1", True, 0, 0, 0, 64, 16, 0)


def ping(handle: Handle) -> Discovery:
    return limits.run(EngineHandles(handle).ping("ingress", limits.scaled_s(0.1)))


def test_all_answer() -> None:
    assert ping(Handle(report("a"), report("b"))) == Discovery(frozenset("ab"), True, (report("a"), report("b")))


def test_one_hangs_or_fails_and_the_others_count() -> None:
    assert ping(Handle(report("a"), None, report("b"))) == Discovery(frozenset("ab"), False, (report("a"), report("b")))
    assert ping(Handle(report("a"), RuntimeError("died"))) == Discovery(frozenset("a"), False, (report("a"),))


def test_no_answer_is_not_no_replica() -> None:
    assert ping(Handle(stuck=True)) == Discovery(frozenset(), complete=False)
    assert ping(Handle(error=DeploymentUnavailableError("engine"))) == Discovery(frozenset(), complete=True)


def test_metrics_of_those_that_answer() -> None:
    handles = EngineHandles(Handle(b"a", None, b"c"))
    assert limits.run(handles.metrics_snapshots(limits.scaled_s(0.1))) == [b"a", b"c"]
