"""The images and the compose file: what hadolint says, what a build would take, and the commands, run as processes."""

from __future__ import annotations

import fnmatch
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.scripts.scripts import start as ray_start

from app.cli import main as manta
from tests.limits import patience_s, wait_until
from tools.cluster_manifests import ROOT

DOCKER = ROOT / "cluster/docker"
COMPOSE = yaml.safe_load((DOCKER / "compose.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
needs_servers = pytest.mark.skipif(
    not all(map(shutil.which, ("prometheus", "promtool", "redis-server"))), reason="needs prometheus and redis-server"
)


def test_hadolint_finds_nothing() -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    found = subprocess.run([hadolint, DOCKER / "Dockerfile"], capture_output=True, text=True, check=False)
    assert found.stdout == ""
    assert found.returncode == 0


def test_the_image_has_what_settings_may_ask_for() -> None:
    """OTEL_EXPORTER_OTLP_ENDPOINT and tokenizer.model need packages; without them the server does not start."""
    requirements = (DOCKER / "requirements.txt").read_text()
    names = set(re.findall(r"^([a-z0-9-]+)==", requirements, re.MULTILINE))
    assert {"ray", "opentelemetry-sdk", "opentelemetry-exporter-otlp-proto-http", "sentencepiece", "tiktoken"} <= names


def test_an_index_without_cuda_brings_torch_alone(tmp_path: Path) -> None:
    (command,) = re.findall(r'python -c "(import pathlib.*)"; ', (DOCKER / "Dockerfile").read_text())
    shutil.copy(DOCKER / "requirements.txt", tmp_path)
    subprocess.run([sys.executable, "-c", command], cwd=tmp_path, check=True)
    before, after = ((folder / "requirements.txt").read_text() for folder in (DOCKER, tmp_path))
    names, left = (set(re.findall(r"^([a-z0-9-]+)==", text, re.MULTILINE)) for text in (before, after))
    gone = names - left
    assert {"torch", "triton", "nvidia-cublas", "cuda-toolkit"} <= gone
    assert {name for name in gone if not name.startswith(("nvidia-", "cuda-"))} == {"torch", "triton"}
    assert not re.search(r"^(?![a-z0-9-]+==|    --hash=sha256:)", after.rstrip("\n"), re.MULTILINE)


def test_what_is_copied_is_there_and_not_ignored() -> None:
    ignore = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")]
    for line in re.findall(r"^COPY (.*)$", (DOCKER / "Dockerfile").read_text(), re.MULTILINE):
        words = [word for word in line.split() if not word.startswith("--")]
        if "--from=" in line:
            continue
        for source in words[:-1]:
            assert (ROOT / source).exists(), source
            assert not _ignored(source, ignore), source
    for secret in (".git", ".venv", "results", "tests", "cluster/docker/compose.yaml", ".env"):
        assert _ignored(secret, ignore), secret


def _ignored(path: str, patterns: list[str]) -> bool:
    """Docker's rule: the last pattern that fits the path, or a directory above it, decides."""
    ignored = False
    for pattern in patterns:
        plain = pattern.lstrip("!").removeprefix("**/")
        above = [path, *map(str, Path(path).parents)]
        if any(fnmatch.fnmatch(place, plain) for place in above):
            ignored = not pattern.startswith("!")
    return ignored


def test_each_image_runs_as_a_user_and_tells_its_health() -> None:
    stages = re.split(r"^FROM ", (DOCKER / "Dockerfile").read_text(), flags=re.MULTILINE)[1:]
    named = {re.search(r" AS (\w+)", stage).group(1): stage for stage in stages}  # type: ignore[union-attr]
    assert set(named) == {"build", "cpu", "cuda"}
    assert named["cuda"].startswith("cpu AS")
    assert "USER 1000:1000" in named["cpu"]
    assert "HEALTHCHECK" in named["cpu"]
    assert "USER" not in named["cuda"]
    assert "gcc" not in named["build"]  # nothing is compiled: what has no wheel fails here, and not at a customer's


def test_compose_keeps_secrets_out_of_commands_and_ports_to_this_machine() -> None:
    for name, service in SERVICES.items():
        assert set(service.get("secrets", [])) <= COMPOSE["secrets"].keys()
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", [])), name
        assert service["cap_drop"] == ["ALL"]
        assert "${" not in " ".join(service.get("command", []))
    assert COMPOSE["networks"]["inner"]["internal"] is True
    assert {name for name, service in SERVICES.items() if "inner" not in service["networks"]} == set()


def test_compose_mounts_what_is_there() -> None:
    for service in SERVICES.values():
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            if source.startswith("."):
                assert (DOCKER / source).is_dir(), source
            else:
                assert source in COMPOSE["volumes"]


def test_compose_deploys_a_configuration_of_the_image(tmp_path: Path) -> None:
    *_, script = SERVICES["manta"]["command"]
    start, deploy = script.split("&&")
    words = [word.replace('"$$(cat', "x").rstrip('")') for word in start.split()]
    ray_start.make_context("ray start", [word for word in words[2:] if not word.startswith("/run/secrets")])
    path = re.search(r"/opt/manta/(configs/\S+)", deploy)
    assert path is not None
    output = tmp_path / "serve.yaml"
    serve = ["serve", ROOT / path.group(1), "--host", "0.0.0.0", "--skip-preflight", "--dry-run", "--output", output]
    assert manta([str(word) for word in serve]) == 0
    written = yaml.safe_load(output.read_text())
    assert written["http_options"]["host"] == "0.0.0.0"
    (model,) = written["applications"][0]["args"]["models"]
    assert model["num_replicas"] == written["applications"][0]["args"]["ingress"]["num_replicas"] == 2


@needs_servers
def test_redis_of_the_compose_file_asks_for_its_password(tmp_path: Path) -> None:
    port = free_port()
    (tmp_path / "password").write_text("long-and-random\n")
    shell, flag, script = SERVICES["redis"]["command"]
    script = script.replace("$$", "$").replace("/run/secrets/redis_password", str(tmp_path / "password"))
    script = script.replace("--dir /data", f"--dir {tmp_path} --bind 127.0.0.1 --port {port}")
    with running([shell, flag, script]):
        wait_until(lambda: b"NOAUTH" in ask(port, b"PING\r\n"))
        assert b"PONG" in ask(port, b"AUTH long-and-random\r\nPING\r\n")


@needs_servers
def test_prometheus_of_the_compose_file_scrapes_manta_with_its_key(tmp_path: Path) -> None:
    """Prometheus by its own command line, over the files that are mounted, with the addresses of this machine."""
    port = free_port()
    shutil.copytree(ROOT / "cluster/prometheus", tmp_path / "etc")
    config = tmp_path / "etc/prometheus.yml"
    (tmp_path / "key").write_text("a-key")
    config.write_text(config.read_text().replace("/run/secrets/api_key", str(tmp_path / "key")))
    subprocess.run(["promtool", "check", "config", config], check=True, capture_output=True)
    command = [
        word.replace("/etc/prometheus", str(tmp_path / "etc")).replace("/prometheus", str(tmp_path / "data"), 1)
        if word.startswith("--storage.tsdb.path") else word.replace("/etc/prometheus", str(tmp_path / "etc"))
        for word in SERVICES["prometheus"]["command"]
    ]  # fmt: skip
    with running(["prometheus", *command, f"--web.listen-address=127.0.0.1:{port}"]):
        targets = f"http://127.0.0.1:{port}/api/v1/targets"
        wait_until(lambda: '"activeTargets":[{' in page(targets))
        text = page(targets)
    assert "http://manta:8000/metrics" in text
    assert "http://manta:9101/metrics" in text


@contextmanager
def running(command: list[Any]) -> Iterator[subprocess.Popen[bytes]]:
    """And what it starts, as a shell does that runs a script."""
    quiet = subprocess.DEVNULL
    with subprocess.Popen(command, stdout=quiet, stderr=quiet, start_new_session=True) as process:
        try:
            yield process
        finally:
            os.killpg(process.pid, signal.SIGKILL)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def ask(port: int, text: bytes) -> bytes:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=patience_s()) as link:
            link.sendall(text + b"QUIT\r\n")
            return b"".join(iter(lambda: link.recv(4096), b""))
    except OSError:
        return b""


def page(url: str) -> str:
    try:
        with urllib.request.urlopen(url, timeout=patience_s()) as answer:
            return str(answer.read().decode())
    except OSError:
        return ""
