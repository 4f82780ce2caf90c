"""Clusters on machines of one's own: scripts, systemd units, `ray up` files."""

from __future__ import annotations

import configparser
import copy
import os
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config
from ray.scripts.scripts import start as ray_start

from tests.limits import patience_s
from tools.cluster_manifests import ROOT

RAY = ROOT / "cluster/ray"
UNITS = sorted((RAY / "systemd").glob("*.service"))
UP = sorted(RAY.glob("up-*.yaml"))
FAKE_RAY = '#!/bin/sh\nprintf "%s\\n" "$@" > "$CALLED"\n'


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """The variables of manta.env.example, with a `ray` that only notes how it was called."""
    (tmp_path / "ray").write_text(FAKE_RAY)
    (tmp_path / "ray").chmod(0o755)
    lines = [line for line in (RAY / "manta.env.example").read_text().splitlines() if line and line[0] != "#"]
    given = dict(line.split("=", 1) for line in lines)
    called = str(tmp_path / "called")
    return {**given, "REDIS_PASSWORD": "secret", "PATH": f"{tmp_path}:{os.environ['PATH']}", "CALLED": called}


def called(environment: dict[str, str]) -> list[str]:
    return Path(environment["CALLED"]).read_text().splitlines()


def run(script: str, environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", RAY / script, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=patience_s())


@pytest.mark.parametrize("script", ["start-head.sh", "start-worker.sh"])
def test_ray_knows_the_options_of_the_scripts(script: str, environment: dict[str, str]) -> None:
    assert run(script, environment).returncode == 0
    command, *options = called(environment)
    assert command == "start"
    given = ray_start.make_context("ray start", options).params
    assert given["block"]
    assert given["metrics_export_port"] == 8080
    assert (given["min_worker_port"], given["max_worker_port"]) == (11000, 19999)
    if script == "start-head.sh":
        assert given["num_cpus"] == 0
        assert given["dashboard_host"] == "127.0.0.1"
        assert given["redis_password"] == "secret"


@pytest.mark.parametrize(
    ("script", "missing"),
    [
        ("start-head.sh", "RAY_AUTH_MODE"),
        ("start-head.sh", "MANTA_NODE_IP"),
        ("start-head.sh", "REDIS_PASSWORD"),
        ("start-head.sh", "MANTA_BLOCK_HASH_KEY_FILE"),
        ("start-worker.sh", "RAY_AUTH_MODE"),
        ("start-worker.sh", "MANTA_HEAD"),
    ],
)
def test_what_would_leave_the_cluster_open_stops_the_start(
    script: str, missing: str, environment: dict[str, str]
) -> None:
    del environment[missing]
    found = run(script, environment)
    assert found.returncode != 0
    assert missing in found.stderr
    assert not Path(environment["CALLED"]).exists()


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_units_run_what_is_there(unit: Path) -> None:
    parser = configparser.RawConfigParser(strict=False)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read(unit)
    service = parser["Service"]
    for key in ("ExecStart", "ExecStop", "ExecReload"):
        if key in service:
            program = shlex.split(service[key])[0]
            inside = re.fullmatch(r"/opt/manta/(cluster/.*)", program)
            assert program.startswith("/opt/manta/.venv/bin/") or (
                inside and os.access(ROOT / inside.group(1), os.X_OK)
            )
    assert service["User"] == "manta"
    assert service["EnvironmentFile"] == "/etc/manta/manta.env"
    if "ExecStop" in service:  # systemd waits longer than the script does
        assert int(service["TimeoutStopSec"]) > int(service["ExecStop"].split()[-1])


@pytest.mark.parametrize("path", UP, ids=lambda path: path.stem)
def test_ray_takes_the_files_of_ray_up(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config: dict[str, Any] = prepare_config(yaml.safe_load(path.read_text()))
    validate_config(config)
    wrong = copy.deepcopy(config)
    wrong["worker_node"] = {}
    with pytest.raises(Exception, match="worker_node"):
        validate_config(wrong)
