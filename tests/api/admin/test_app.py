"""The operator's routes: who may, what reaches the replicas, what they answer."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from starlette.testclient import TestClient

from app.api.admin.app import MAX_REQUESTS, create_admin_app
from app.api.engine_client import ReplicaAnswer
from app.api.http.auth import ApiKeys
from app.config.admin import AdminConfig
from app.config.ingress import IngressConfig
from app.config.model import ModelConfig
from app.config.serve import ServeConfig
from app.deployments.config_check import check_config
from app.engine.control import CONTROLS, REMOTE
from app.errors import CheckpointError, ConfigError, InvalidRequestError, MantaError
from app.telemetry.tenant_tokens import TenantLabels
from tests import limits

KEY = "operator-key-0123"
STATE = {"sleep_level": 1, "is_paused": True, "world_size": 2}
CONFIG = ServeConfig(
    models=(ModelConfig(name="m", aliases=("n",)),), ingress=IngressConfig(api_keys_file="/secret/keys"),
    admin=AdminConfig(port=9999, keys_file="/secret/admin"),
)  # fmt: skip


class Fleet:
    """Two replicas that say what they were asked."""

    def __init__(self) -> None:
        self.models: Any = {"m": SimpleNamespace(name="m"), "n": SimpleNamespace(name="m")}
        self.asked: list[Any] = []
        self.error: MantaError | None = None

    async def control(self, model: str, name: str, arguments: dict[str, Any], timeout_s: float) -> list[ReplicaAnswer]:
        self.asked.append((model, name, arguments))
        result = STATE if name == "describe" else None
        return [ReplicaAnswer("a", result), ReplicaAnswer("b", result, self.error)]

    async def describe(self) -> list[dict[str, Any]]:
        return [{"name": "m", "replicas": []}]

    async def drain(self, replica_id: str, is_drained: bool, move: bool) -> None:
        self.asked.append((replica_id, is_drained, move))


def serve(key: str | None = KEY) -> tuple[TestClient, Fleet]:
    fleet = Fleet()
    keys = ApiKeys.of_operators(AdminConfig(port=1), {"MANTA_ADMIN_KEYS": KEY})
    headers = {"authorization": f"Bearer {key}"} if key else {}
    return TestClient(create_admin_app(fleet, CONFIG, keys, TenantLabels(b"secret")), headers=headers), fleet


@pytest.fixture
def served() -> tuple[TestClient, Fleet]:
    return serve()


@pytest.mark.parametrize("key", [None, "a-tenants-key"])
def test_only_an_operator_may(key: str | None) -> None:
    client, fleet = serve(key)
    routes = client.app.routes  # type: ignore[attr-defined]
    asked = {(method, route.path) for route in routes for method in route.methods}
    opened = {one for one in asked if client.request(*one).status_code != 401}
    assert {path for _, path in opened} == {"/health"}
    assert len(asked) > 20
    assert not fleet.asked


def test_there_is_no_listener_without_a_key() -> None:
    with pytest.raises(ConfigError, match=r"admin\.keys_file"):
        ApiKeys.of_operators(AdminConfig(port=1), {"MANTA_API_KEYS": "a-tenants-key"})
    with pytest.raises(ConfigError, match="MANTA_ADMIN_KEYS is set but holds no key"):
        ApiKeys.of_operators(AdminConfig(port=1), {"MANTA_ADMIN_KEYS": " "})
    config = ServeConfig(models=(ModelConfig(name="tiny-chat"),), admin=AdminConfig(port=9999))
    with pytest.raises(ConfigError, match=r"admin\.keys_file"):
        check_config(config, {})
    check_config(config, {"MANTA_ADMIN_KEYS": KEY})


def test_keys_of_a_file(tmp_path: Any) -> None:
    file = tmp_path / "keys"
    file.write_text("alice=first-operator\n")
    keys = ApiKeys.of_operators(AdminConfig(port=1, keys_file=str(file)), {"MANTA_ADMIN_KEYS_FILE": str(file)})
    assert keys.tenant("first-operator") == "alice"


def test_one_request_too_many_is_refused_in_the_form_of_errors() -> None:
    """65 at once, of which 64 wait for replicas; once these have answered there is room again."""
    fleet, asked, go_on = Fleet(), asyncio.Event(), asyncio.Event()

    async def control(*arguments: Any) -> list[ReplicaAnswer]:
        fleet.asked.append(arguments)
        if len(fleet.asked) == MAX_REQUESTS:
            asked.set()
        await go_on.wait()
        return [ReplicaAnswer("a", STATE)]

    fleet.control = control  # type: ignore[method-assign]
    app = create_admin_app(
        fleet, CONFIG, ApiKeys.of_operators(AdminConfig(port=1), {"MANTA_ADMIN_KEYS": KEY}), TenantLabels()
    )

    async def main() -> None:
        transport, headers = httpx.ASGITransport(app), {"authorization": f"Bearer {KEY}"}
        async with httpx.AsyncClient(transport=transport, base_url="http://admin", headers=headers) as http:
            waiting = [asyncio.create_task(http.post("/resume")) for _ in range(MAX_REQUESTS)]
            await asked.wait()
            refused = await http.post("/resume")
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == "server_overloaded"
            assert refused.headers["retry-after"] == "1"
            assert refused.headers["x-request-id"]
            go_on.set()
            assert {answer.status_code for answer in await asyncio.gather(*waiting)} == {200}
            assert (await http.post("/resume")).status_code == 200

    limits.run(main())


def test_every_replica_is_asked(served: tuple[TestClient, Fleet]) -> None:
    client, fleet = served
    assert client.post("/sleep?level=2&mode=keep").json() == {
        "results": [{"replica_id": "a", "result": None}, {"replica_id": "b", "result": None}]
    }
    for path in ("/sleep", "/sleep?level=0&model=n", "/wake_up?tags=weights&tags=kv_cache", "/wake_up",
                 "/pause", "/pause?mode=wait&clear_cache=false", "/resume", "/reset_prefix_cache",
                 "/abort_requests"):  # fmt: skip
        assert client.post(path).status_code == 200, path
    client.post("/collective_rpc", json={"method": "reload_weights", "kwargs": {"mode": "abort"}})
    client.post("/update_weights", json={"path": "/new"})
    update = {"names": ["a"], "dtype_names": ["float32"], "shapes": [[2, 3]]}
    client.post("/update_weights", json={"update_info": update})
    client.post("/init_weight_transfer_engine", json={
        "init_info": {"master_address": "h", "master_port": 5, "rank_offset": 1, "world_size": 3}
    })  # fmt: skip
    client.post("/start_weight_update", json={"mode": "keep"})
    client.post("/finish_weight_update", json={"version": "7"})
    client.post("/reload_weights")  # all of its fields have defaults
    assert [asked[1:] for asked in fleet.asked] == [
        ("sleep", {"level": 2, "mode": "keep"}),
        ("sleep", {"level": 1, "mode": "abort"}),
        ("pause", {"mode": "abort"}),
        ("wake_up", {"tags": ["weights", "kv_cache"]}),
        ("wake_up", {"tags": None}),
        ("pause", {"mode": "abort", "clear_cache": True}),
        ("pause", {"mode": "wait", "clear_cache": False}),
        ("resume", {}),
        ("reset_prefix_cache", {}),
        ("abort_requests", {}),
        ("reload_weights", {"mode": "abort"}),
        ("update_weights", {"path": "/new", "mode": "wait"}),
        ("receive_weights", update),
        ("init_weight_transfer_engine", {"master_address": "h", "master_port": 5, "rank_offset": 1, "world_size": 3}),
        ("start_weight_update", {"mode": "keep"}),
        ("finish_weight_update", {"version": "7", "whole": False}),
        ("reload_weights", {"mode": "wait"}),
    ]
    assert {asked[0] for asked in fleet.asked} == {"m"}


def test_what_the_replicas_are(served: tuple[TestClient, Fleet]) -> None:
    client, fleet = served
    assert client.get("/is_sleeping").json() == {"is_sleeping": True}
    assert client.get("/is_paused").json() == {"is_paused": True}
    assert client.get("/get_world_size").json() == {"world_size": 4}
    assert client.get("/models").json() == {"models": [{"name": "m", "replicas": []}]}
    fleet.asked.clear()
    client.post("/replicas/r1/drain?move=true")
    client.post("/replicas/r1/resume")
    assert fleet.asked == [("r1", True, True), ("r1", False, False)]
    info = client.get("/server_info")
    assert info.json()["config"]["admin"] == {
        "port": 9999,
        "host": "127.0.0.1",
        "adapter_roots": [],
        "transfer_idle_s": 300.0,
        "held_wait_s": 60.0,
    }
    assert "/secret" not in info.text


@pytest.mark.parametrize(
    ("method", "path", "body", "param"),
    [
        ("POST", "/sleep?level=3", None, "level"),
        ("POST", "/sleep?mode=later", None, "mode"),
        ("POST", "/sleep?levle=1", None, "levle"),
        ("POST", "/wake_up?tags=weights&tags=all", None, "tags"),
        ("POST", "/pause?clear_cache=1", None, "clear_cache"),
        ("POST", "/reset_prefix_cache?reset_running_requests=true", None, "reset_running_requests"),
        ("POST", "/resume?model=x", None, "model"),
        ("GET", "/is_sleeping?a=1", None, "a"),
        ("POST", "/replicas/a/drain?move=yes", None, "move"),
        ("POST", "/collective_rpc", {"method": "load_weights"}, "method"),
        ("POST", "/collective_rpc", {"method": "pause", "args": ["abort"]}, "args"),
        ("POST", "/collective_rpc", {"method": "pause", "timeout": 1e9}, "timeout"),
        ("POST", "/update_weights", {}, "path"),
        ("POST", "/update_weights", {"path": "/a", "update_info": {"names": ["a"], "dtype_names": ["b"], "shapes": []}},
         "path"),
        ("POST", "/update_weights", {"path": "/a", "mode": "now"}, "mode"),
        ("POST", "/update_weights", {"pth": "/a"}, "pth"),
        ("POST", "/finish_weight_update", {"version": "x" * 257}, "version"),
        ("POST", "/init_weight_transfer_engine", {"init_info": {"master_address": "", "master_port": 1}},
         "init_info.master_address"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(
    served: tuple[TestClient, Fleet], method: str, path: str, body: Any, param: str
) -> None:
    client, fleet = served
    refused = client.request(method, path, json=body)
    assert refused.status_code == (404 if "model=x" in path else 400), refused.text
    assert refused.json()["error"]["param"] == param
    assert not fleet.asked


def test_a_replicas_error_is_the_answer(served: tuple[TestClient, Fleet]) -> None:
    client, fleet = served
    fleet.error = InvalidRequestError("path: no such model", param="path")
    failed = client.post("/reset_prefix_cache")
    assert failed.status_code == 400
    assert failed.json()["error"]["message"] == "replica b: path: no such model (1 of 2 replicas did it)"
    fleet.error = ConfigError("model '/x': no such path", param="model")
    check = {"method": "check_weights", "kwargs": {"path": "/x"}}
    for path, body in (("/update_weights", {"path": "/x"}), ("/collective_rpc", check)):
        failed = client.post(path, json=body)
        assert (failed.status_code, failed.json()["error"]["param"]) == (400, "path"), path
        assert "'/x'" in failed.json()["error"]["message"]
    failed = client.post("/reload_weights")  # which names no directory
    assert failed.json()["error"]["param"] == "model"
    assert set(CONTROLS) >= set(REMOTE)


def test_an_empty_body_records_a_profile(served: tuple[TestClient, Fleet]) -> None:
    client, _ = served
    assert "profile_directory" in client.post("/start_profile").json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/finish_weight_update", {"whole": True}, 400, "whole"),
        ("/finish_weight_update", {}, 400, None),
        ("/update_weights", {"path": "/new"}, 400, "path"),
        ("/reload_weights", {}, 500, None),  # the server's own directory
    ],
)
def test_whose_fault_tensors_that_do_not_fit_are(path: str, body: Any, status: int, param: str | None) -> None:
    client, fleet = serve()
    fleet.error = CheckpointError("the update lacks model.embed_tokens.weight")
    answer = client.post(path, json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param)
    assert "lacks model.embed_tokens.weight" in answer.json()["error"]["message"]


def test_whose_label_it_is() -> None:
    client, _ = serve()
    assert client.get("/tenant_label?tenant=acme").json() == {
        "tenant": "acme",
        "label": TenantLabels(b"secret").of("acme"),
    }
    assert client.get("/tenant_label").json()["error"]["param"] == "tenant"
