"""The Admin deployment's parts without Serve: its listener, whose replica is meant, what is asked of replicas."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import httpx
import pytest
from starlette.responses import PlainTextResponse

from app.api.engine_client import ReplicaAnswer
from app.config.admin import AdminConfig
from app.config.model import ModelConfig
from app.config.serve import ServeConfig
from app.deployments.admin import listener, shared_state
from app.deployments.admin.admin import Fleets
from app.deployments.admin.engine_port import EnginePort
from app.deployments.admin.fleet import ModelFleet
from app.deployments.admin.fleet_state import FleetState, MemberReport
from app.deployments.admin.listener import Listener
from app.deployments.admin.shared_state import SharedState
from app.deployments.app import build_graph
from app.errors import ConfigError, InvalidRequestError, ModelNotFoundError
from benchmarks.serve_process import free_port
from tests import limits
from tests.deployments.admin.fake_fleet import FakePort, FakeReplica
from tests.limits import run, until


def test_the_listener_opens_and_leaves_its_port(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "BIND_TRIES_S", 0.0)
    monkeypatch.setattr(listener, "RETRY_S", 0.0)
    port = free_port()

    async def main() -> None:
        one, other = (Listener(PlainTextResponse("here"), "127.0.0.1", port) for _ in range(2))
        await one.start()
        async with httpx.AsyncClient(timeout=limits.patience_s()) as http:
            assert (await http.get(f"http://127.0.0.1:{port}/")).text == "here"
        with pytest.raises(ConfigError, match=rf"admin\.port: cannot listen at 127\.0\.0\.1:{port}"):
            await other.start()
        assert one.is_serving
        assert not other.is_serving
        await one.close()
        assert not one.is_serving
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))

    run(main())


def test_many_connections_meet_the_applications_answer_and_no_other() -> None:
    port = free_port()

    async def main() -> None:
        one = Listener(PlainTextResponse("here"), "127.0.0.1", port)
        await one.start()
        async with httpx.AsyncClient(timeout=limits.patience_s()) as http:
            assert (await http.get(f"http://127.0.0.1:{port}/")).text == "here"
            idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(80)]
            assert (await http.get(f"http://127.0.0.1:{port}/")).text == "here"
        for _, writer in idle:
            writer.close()
        await one.close()

    run(main())


def test_whose_replicas_are_meant() -> None:
    config = ServeConfig(models=(ModelConfig(name="m", aliases=("n",)), ModelConfig(name="o")))

    async def main() -> None:
        ports = {name: FakePort(FakeReplica(f"{name}-0", [])) for name in ("m", "o")}
        for port in ports.values():
            for replica in port.replicas.values():
                replica.member.tell_alone()
        fleets = {name: ModelFleet(name, port) for name, port in ports.items()}
        for fleet in fleets.values():
            await fleet.recover()
        all_of_them = Fleets(config, fleets)
        assert [model.name for model in all_of_them.models.values()] == ["m", "m", "o"]
        (answer,) = await all_of_them.control("n", "pause", {}, 1.0)
        assert answer.replica_id == "m-0"
        assert [one["name"] for one in await all_of_them.describe()] == ["m", "o"]
        await all_of_them.drain("o-0", True, False)
        assert ports["o"].replicas["o-0"].is_drained
        with pytest.raises(InvalidRequestError, match="no replica 'x' runs"):
            await all_of_them.drain("x", True, False)
        with pytest.raises(ModelNotFoundError):
            await all_of_them.control("x", "pause", {}, 1.0)

    run(main())


def test_a_client_that_leaves_does_not_end_a_change_half_way() -> None:
    config = ServeConfig(models=(ModelConfig(name="m"),))

    async def main() -> None:
        replica = FakeReplica("a", [])
        replica.member.tell_alone()
        replica.gates["pause"] = asyncio.Event()
        fleet = ModelFleet("m", FakePort(replica))
        await fleet.recover()
        call = asyncio.create_task(Fleets(config, {"m": fleet}).control("m", "pause", {}, 1.0))
        await until(lambda: fleet.state.is_changing)
        call.cancel()
        replica.gates["pause"].set()
        await until(lambda: fleet.state.is_paused)

    run(main())


class Handle:
    """A Serve handle: `answers` by method, an exception is raised."""

    def __init__(self, answers: dict[str, Any], method: str = "") -> None:
        self._answers = answers
        self._method = method

    def options(self, method_name: str) -> Handle:
        return Handle(self._answers, method_name)

    async def remote(self, *arguments: Any, **named: Any) -> Any:
        answer = self._answers[self._method]
        if isinstance(answer, Exception):
            raise answer
        return answer

    def broadcast(self, method: str, *arguments: Any) -> Any:
        answers = self._answers[method]

        class Result:
            def __init__(self, answer: Any) -> None:
                self._answer = answer

            async def get_async(self) -> Any:
                if isinstance(self._answer, Exception):
                    raise self._answer
                return self._answer

        class Response:
            async def _fetch_replica_results_async(self) -> list[Result]:
                if isinstance(answers, Exception):
                    raise answers
                return [Result(answer) for answer in answers]

        return Response()


def test_replicas_that_do_not_answer_are_errors_of_their_own() -> None:
    async def main() -> None:
        report = MemberReport("a", 0, None)
        assert await EnginePort(Handle({"fleet_member": [report, TimeoutError()]})).members() == [report]
        assert await EnginePort(Handle({"fleet_member": TimeoutError()})).members() == []
        done = ReplicaAnswer("a", 1)
        assert await EnginePort(Handle({"run_control": done})).control({"a": {}}, "pause", 1.0) == [done]
        (lost,) = await EnginePort(Handle({"run_control": TimeoutError()})).control({"a": {}}, "pause", 1.0)
        assert lost.error is not None
        assert "did not answer" in lost.error.message
        (lost,) = await EnginePort(Handle({"bring_to": TimeoutError()})).bring_to(["a"], FleetState(), 1.0)
        assert lost.error is not None
        assert await EnginePort(Handle({"tell_fleet_state": True})).tell(["a"], FleetState()) == ["a"]
        assert await EnginePort(Handle({"tell_fleet_state": False})).tell(["a"], FleetState()) == []
        assert not await EnginePort(Handle({"drain": TimeoutError()})).drain("a", True, False)
        await EnginePort(Handle({"leave": TimeoutError()})).leave(["a"])

    run(main())


@pytest.mark.parametrize(
    ("admin", "peers", "epoch"),
    [
        (FleetState(epoch=5), [FleetState(epoch=9)], 5),
        (TimeoutError(), [None, FleetState(epoch=2), FleetState(epoch=3), TimeoutError()], 3),
        (TimeoutError(), [None], 0),
        (TimeoutError(), TimeoutError(), 0),
    ],
)
def test_who_says_what_the_fleet_is(monkeypatch: pytest.MonkeyPatch, admin: Any, peers: Any, epoch: int) -> None:
    handles = {"Admin": Handle({"fleet_state": admin}), "Engine-m": Handle({"fleet_state": peers})}
    context = type("Context", (), {"deployment": "Engine-m", "app_name": "manta"})
    monkeypatch.setattr(shared_state.serve, "get_replica_context", lambda: context)
    monkeypatch.setattr(shared_state.serve, "get_deployment_handle", lambda name, app: handles[name])
    monkeypatch.setattr(shared_state, "RETRY_S", 0.0)
    assert run(SharedState("m").ask()).epoch == epoch


def test_peers_that_are_silent_are_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[Any] = [TimeoutError(), [TimeoutError()], [None, FleetState(epoch=4)]]

    async def nobody(*_: Any, **__: Any) -> Any:
        raise TimeoutError

    async def peers(*_: Any, **__: Any) -> Any:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    context = type("Context", (), {"deployment": "Engine-m", "app_name": "manta"})
    monkeypatch.setattr(shared_state.serve, "get_replica_context", lambda: context)
    monkeypatch.setattr(shared_state.serve, "get_deployment_handle", lambda name, app: Handle({}))
    for name, value in (("call", nobody), ("broadcast", peers), ("RETRY_S", 0.0)):
        monkeypatch.setattr(shared_state, name, value)
    assert run(SharedState("m").ask()).epoch == 4


def test_there_is_none_unless_it_is_asked_for() -> None:
    def names(admin: AdminConfig, **options: Any) -> set[str]:
        model = ModelConfig.model_validate({"name": "m", **options})
        root: Any = build_graph(ServeConfig(models=(model,), admin=admin))
        return {
            one._bound_deployment.name for one in root._bound_deployment.init_args if hasattr(one, "_bound_deployment")
        }

    assert names(AdminConfig()) == {"Router"}
    assert names(AdminConfig(port=8001)) == {"Router", "Admin"}
    looks_up = {"adapter_resolver": "directory", "adapter_directory": "/a", "engine": {"enable_lora": True}}
    assert names(AdminConfig(), **looks_up) == {"Router", "Admin"}
