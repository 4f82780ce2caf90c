"""A second server on a machine, by --port alone."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from app.cli import serve, serve_ports
from app.cli.cluster import Cluster
from app.cli.machine import Machine
from app.cli.serve_ports import SERVE_PORTS
from benchmarks.serve_process import ROOT, free_port
from tests.cli.conftest import Manta

FALLBACK = "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT"
HERE = Machine("this machine", 8, 0, 16 << 30, None)


@pytest.fixture
def neighbour(manta: Manta, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Another Serve's fallback proxy on the port that is ours by default, listening as Serve's does."""
    monkeypatch.setattr(serve, "find_machine", lambda: HERE)
    monkeypatch.setattr(serve.os, "execve", lambda *_: None)
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        monkeypatch.setitem(SERVE_PORTS, FALLBACK, taken.getsockname()[1])
        monkeypatch.delenv(FALLBACK)
        yield taken.getsockname()[1]


def environments(file: Path) -> list[dict[str, str]]:
    document: dict[str, Any] = yaml.safe_load(file.read_text())
    places = [document["controller_options"], *document["applications"]]
    return [place["runtime_env"]["env_vars"] for place in places]


@pytest.mark.parametrize("target", ["tiny-chat", str(ROOT / "configs/serve/quickstart.yaml")])
def test_free_ports_are_chosen(manta: Manta, neighbour: int, tmp_path: Path, target: str) -> None:
    file = tmp_path / "mine.yaml"
    done = manta("serve", target, "--port", free_port(), "-o", file)
    assert not done.err
    controller, application = environments(file)
    assert controller == application
    port = int(controller[FALLBACK])
    assert port != neighbour
    assert serve_ports.is_free(port)
    assert f"Serve's ports: {FALLBACK}={port}" in done.out
    assert "RAY_SERVE_HAPROXY_STATS_PORT" not in controller, "set in the environment"


def test_what_a_user_set_stays(manta: Manta, neighbour: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FALLBACK, str(neighbour))
    assert manta("serve", "--port", free_port()).mistake.startswith(f"port {neighbour} ({FALLBACK}) is taken")


def test_a_file_that_is_not_written_anew_stays(manta: Manta, neighbour: int, tmp_path: Path) -> None:
    document = yaml.safe_load((ROOT / "configs/serve/quickstart.yaml").read_text())
    document["http_options"]["port"] = free_port()
    file = tmp_path / "mine.yaml"
    file.write_text(yaml.safe_dump(document))
    assert "or give --port" in manta("serve", file).mistake
    assert manta("serve", file, "--dry-run").code == 0, "for which it is a note"


def test_a_cluster_has_its_own(manta: Manta, neighbour: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    joined = Machine("the Ray cluster at x", 64, 1, None, None, Cluster("x", 64, 1, None))
    monkeypatch.setattr(serve, "find_machine", lambda: joined)
    file = tmp_path / "mine.yaml"
    assert not manta("serve", "--port", free_port(), "-o", file).err
    assert FALLBACK not in environments(file)[0]
