"""What one ingress replica tells the others."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from ray.exceptions import RayActorError
from ray.serve.exceptions import DeploymentUnavailableError, RequestCancelledError

from app.deployments.ingress import peers
from app.deployments.ingress.peers import Peers, SharedQuarantines
from app.errors import PoisonedRequestError
from app.records.request import EngineRequest
from app.records.sampling_params import SamplingParams
from tests.limits import run, until

POISON = EngineRequest("r", [1, 2], SamplingParams(max_tokens=3))


class Application(Peers):
    """Ingress replicas in this process, which reach each other as over Serve."""

    def __init__(self) -> None:
        super().__init__()
        self.replicas: list[SharedQuarantines] = []

    async def ask(self, method: str, *arguments: Any) -> list[Any]:
        await asyncio.sleep(0)
        return [getattr(replica, method)(*arguments) for replica in self.replicas]

    def add(self) -> SharedQuarantines:
        self.replicas.append(SharedQuarantines(self, {"m": None, "other": None}))
        self.replicas[-1].learn()
        return self.replicas[-1]


def is_refused(replica: SharedQuarantines, model: str = "m") -> bool:
    try:
        replica.of[model].check(POISON)
    except PoisonedRequestError:
        return True
    return False


def test_what_one_refuses_all_refuse_and_those_too_that_come_later() -> None:
    async def main() -> None:
        application = Application()
        first, second = application.add(), application.add()
        await until(lambda: not first._tasks and not second._tasks)  # they have asked each other
        first.of["m"].add(POISON)
        await until(lambda: is_refused(second))
        late = application.add()
        await until(lambda: is_refused(late))
        assert not is_refused(late, "other")

    run(main())


def test_peers_that_cannot_be_asked_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    async def ask() -> list[Any]:
        found = Peers()
        monkeypatch.setattr(found, "handle", lambda: None)
        return await found.ask("refused")

    for outcome in (DeploymentUnavailableError("d"), TimeoutError(), RayActorError(), RequestCancelledError("r")):

        async def broadcast(*_: Any, outcome: Exception = outcome, **__: Any) -> list[Any]:
            raise outcome

        monkeypatch.setattr(peers, "broadcast", broadcast)
        assert run(ask()) == []

    async def answers(*_: Any, **__: Any) -> list[Any]:
        return [1, TimeoutError(), 2]

    monkeypatch.setattr(peers, "broadcast", answers)
    assert run(ask()) == [1, 2]
