"""Serve gets the configuration while its proxies start."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from ray import serve
from ray.serve import context
from ray.serve.schema import ServeDeploySchema

from app.cli import deploy as module
from app.cli.deploy import deploy
from benchmarks.serving import CONFIG
from tests.limits import patience_s


class Client:
    def __init__(self, proxies_may_end: threading.Event) -> None:
        self.got: list[ServeDeploySchema] = []
        self._proxies_may_end = proxies_may_end

    def deploy_apps(self, config: ServeDeploySchema) -> None:
        self.got.append(config)
        self._proxies_may_end.set()


def test_the_configuration_is_given_before_the_proxies_are_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    has_controller, may_end, options = threading.Event(), threading.Event(), {}
    client = Client(may_end)

    def start(**given: Any) -> None:
        options.update(given)
        has_controller.set()
        assert may_end.wait(patience_s()), "the configuration came only afterwards"

    def find(raise_if_no_controller_running: bool) -> Client | None:
        assert not raise_if_no_controller_running
        return client if has_controller.is_set() else None

    monkeypatch.setattr(serve, "start", start)
    monkeypatch.setattr(context, "_get_global_client", find)
    monkeypatch.setattr(module, "POLL_S", 0)
    deploy(CONFIG)
    (config,) = client.got
    assert [application.name for application in config.applications] == ["manta"]
    assert options["http_options"]["host"] == "127.0.0.1"
    assert options["controller_options"].runtime_env["env_vars"]["RAY_SERVE_ENABLE_HA_PROXY"] == "1"


@pytest.mark.parametrize("has_controller", [False, True])
def test_a_start_that_fails_is_told(monkeypatch: pytest.MonkeyPatch, has_controller: bool) -> None:
    client = Client(threading.Event())

    def start(**_: Any) -> None:
        raise TimeoutError("HTTP proxies not available")

    monkeypatch.setattr(serve, "start", start)
    monkeypatch.setattr(context, "_get_global_client", lambda **_: client if has_controller else None)
    with pytest.raises(TimeoutError, match="proxies not available"):
        deploy(CONFIG)


def test_a_file_that_is_none_starts_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "start", pytest.fail)
    path = tmp_path / "serve.yaml"
    path.write_text("applications: 3")
    with pytest.raises(ValueError, match="applications"):
        deploy(path)
