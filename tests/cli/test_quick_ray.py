"""What is replaced in Ray while it starts is asked for, announced, and put back."""

from __future__ import annotations

import ast
import threading
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray._private import ray_constants, utils
from ray._private.node import Node
from ray.dashboard import optional_deps

from app.cli import worker_template
from app.cli.quick_ray import AGENTS_MODULES, fault_of_agent, quick_ray, step_timeout_s, variables_of_controller
from app.cli.ray_worker import become
from tests.limits import patience_s

Replaced = tuple[Any, ...]


def replaced() -> Replaced:
    """What is replaced, as it is now."""
    return (
        ray_constants.SETUP_WORKER_FILENAME,
        ray_constants.DEFAULT_DASHBOARD_AGENT_LISTEN_PORT,
        utils.get_dashboard_dependency_error,
        Node.start_raylet,
        Node.start_api_server,
    )


@pytest.mark.parametrize(("dashboard", "changed"), [(True, 4), (False, 5)])
def test_all_is_put_back(dashboard: bool, changed: int) -> None:
    before = replaced()
    with suppress(KeyboardInterrupt), quick_ray({}, dashboard):
        assert sum(now is not then for now, then in zip(replaced(), before, strict=True)) == changed
        raise KeyboardInterrupt
    assert replaced() == before


def test_workers_are_announced_once_there_is_who_starts_them(monkeypatch: pytest.MonkeyPatch) -> None:
    began, announced = list[str](), dict[str, dict[str, str]]()
    monkeypatch.setattr(Node, "start_raylet", lambda *_: began.append("raylet"))
    monkeypatch.setattr(worker_template, "announce", lambda kind, variables: announced.update({kind: variables}))
    raylet = SimpleNamespace(process=SimpleNamespace(pid=7))
    with quick_ray({"controller_options": {"runtime_env": {"env_vars": {"RAY_A": "1"}}}}, dashboard=True):
        assert not announced
        Node.start_raylet(SimpleNamespace(all_processes={"raylet": [raylet], "gcs_server": []}))
    assert began == ["raylet"]
    host, device = announced[become.HOST], announced[become.DEVICE]
    assert (host["RAY_A"], host["RAY_RAYLET_PID"], host["RAY_JOB_ID"]) == ("1", "7", "01000000")
    assert host.items() < device.items(), "workers that compute have settings of their own"


def test_the_dashboard_is_started_beside(monkeypatch: pytest.MonkeyPatch) -> None:
    started = threading.Event()
    monkeypatch.setattr(Node, "start_api_server", lambda *_: started.set())
    with quick_ray({}, dashboard=False):
        Node.start_api_server(SimpleNamespace())
        assert started.wait(patience_s())


@pytest.mark.parametrize(
    ("options", "variables"),
    [
        ({"runtime_env": {"env_vars": {"A": "1"}}}, {"A": "1"}),
        ({"runtime_env": {"env_vars": {"A": 1, "B": "2"}}}, {"B": "2"}),
        ({"runtime_env": "x"}, {}),
        ([1], {}),
        (None, {}),
    ],
)
def test_a_mistake_in_the_controllers_options_is_not_told_here(options: Any, variables: dict[str, str]) -> None:
    assert variables_of_controller({"controller_options": options}) == variables
    assert variables_of_controller({}) == {}


def test_what_the_agent_cannot_import_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(utils, "get_dashboard_dependency_error", lambda: None)
    assert fault_of_agent() == ""
    monkeypatch.setattr(utils, "get_dashboard_dependency_error", lambda: ImportError("no grpc"))
    assert "no grpc" in fault_of_agent()


def test_an_agent_that_fails_with_another_error_is_said_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Protobuf of another version raises a TypeError of several lines."""

    def fails() -> None:
        raise TypeError("Descriptors cannot be\n  created directly")

    monkeypatch.setattr(utils, "get_dashboard_dependency_error", fails)
    assert fault_of_agent().endswith(": Descriptors cannot be created directly")


@pytest.mark.parametrize(
    ("engine", "seconds"),
    [({"step_timeout_s": 20}, 20.0), ({}, 300.0), ({"step_timeout_s": "long"}, 300.0), (None, 300.0)],
)
def test_the_time_of_a_step_is_the_first_models(engine: dict[str, Any] | None, seconds: float) -> None:
    document = {"applications": [{"args": {"models": [{"engine": engine}]}}]}
    assert step_timeout_s(document) == seconds
    assert step_timeout_s({"applications": [{"args": None}]}) == 300.0


@pytest.mark.parametrize(("module", "asked"), [("pydantic", 0), ("no_such_module", 1), ("no_such.module", 1)])
def test_rays_agent_is_looked_for_and_not_imported(monkeypatch: pytest.MonkeyPatch, module: str, asked: int) -> None:
    imports = list[int]()
    monkeypatch.setattr(utils, "get_dashboard_dependency_error", lambda: imports.append(1))
    monkeypatch.setattr("app.cli.quick_ray.AGENTS_MODULES", ("grpc", module))
    with quick_ray({}, dashboard=False):
        assert utils.get_dashboard_dependency_error() is None
    assert len(imports) == asked


def test_rays_agent_needs_what_is_looked_for() -> None:
    tree = ast.parse(Path(optional_deps.__file__).read_text())
    needed = {name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names}
    needed |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    missing = {name for name in needed if not any(f"{one}.".startswith(f"{name}.") for one in AGENTS_MODULES)}
    assert all(name.partition(".")[0] == "aiohttp" for name in missing), missing
