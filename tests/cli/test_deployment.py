"""What `manta serve` says and does when Serve gives an application up."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from ray import serve
from ray.serve.schema import ApplicationStatus, ApplicationStatusOverview, DeploymentStatusOverview, ServeStatus

from app.cli import deployment
from app.cli.deployment import Sigterm, failure, last_error, run, wait_until_running
from app.cli.serve_ports import SERVE_PORTS
from benchmarks.serve_process import ROOT, free_port
from benchmarks.serving import CONFIG
from tests.limits import patience_s, wait_until

# As Serve 2.60 keeps it, shortened.
CONSTRUCTOR = """The deployment failed to start 3 times in a row. This may be due to a problem with its constructor or \
initial health check failing. See controller logs for details. Error:
\x1b[36mray::ServeReplica:manta:Ingress.initialize_and_get_metadata()\x1b[39m (pid=1, ip=192.0.2.2, repr=<Ingress>)
  File "replica.py", line 1928, in initialize
    raise RuntimeError(traceback.format_exc()) from None
RuntimeError: Traceback (most recent call last):
  File "auth.py", line 140, in _read_file
    raise ConfigError(f"api_keys_file: cannot read {path}", param="api_keys_file") from None
app.errors.ConfigError: api_keys_file: cannot read nokeys.txt
and a second line"""
REASON = "ConfigError: api_keys_file: cannot read nokeys.txt; and a second line"


def status(state: ApplicationStatus, message: str = "", **deployments: tuple[str, str]) -> ServeStatus:
    shown: Any = {
        name: DeploymentStatusOverview(kind, "REPLICA_STARTUP_FAILED", {}, why)  # type: ignore[arg-type]
        for name, (kind, why) in deployments.items()
    }
    return ServeStatus(applications={"manta": ApplicationStatusOverview(state, message, 0.0, shown)})


def test_the_cause_on_one_line() -> None:
    failed = status(
        ApplicationStatus.DEPLOY_FAILED,
        "Failed to update the deployments ['Ingress'].",
        Ingress=("DEPLOY_FAILED", CONSTRUCTOR),
        Router=("HEALTHY", ""),
    )
    assert failure(failed, ["manta"]) == f"application 'manta' cannot start: Ingress: {REASON}"
    assert failure(failed, ["other"]) is None, "another application of the cluster is not ours"
    assert failure(status(ApplicationStatus.DEPLOYING), ["manta"]) is None
    unbuilt = status(ApplicationStatus.DEPLOY_FAILED, CONSTRUCTOR.replace("ray::ServeReplica", "ray::build"))
    assert failure(unbuilt, ["manta"]) == f"application 'manta' cannot start: {REASON}"


def test_a_message_without_a_traceback() -> None:
    assert last_error("Failed to update\nthe deployments") == "Failed to update; the deployments"


def test_waits_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    running, nothing = status(ApplicationStatus.RUNNING), ServeStatus()
    answers = [nothing, status(ApplicationStatus.DEPLOYING), running]
    monkeypatch.setattr(serve, "status", lambda: answers.pop(0))
    assert wait_until_running(["manta"], poll_s=0) is None
    assert not answers
    answers += [nothing, status(ApplicationStatus.DEPLOY_FAILED, "why")]
    assert wait_until_running(["manta"], poll_s=0) == "application 'manta' cannot start: why"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ends", "address", "code", "is_shut_down", "said"),
    [
        (KeyboardInterrupt(), "auto", 0, True, "shutting down"),
        (TimeoutError("no proxies"), "local", 1, True, "Serve does not start: TimeoutError: no proxies"),
        (TimeoutError("no proxies"), "auto", 1, False, "it stays on the cluster"),
    ],
)
def test_a_start_that_breaks_off_leaves_nothing_behind_unsaid(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    ends: BaseException,
    address: str,
    code: int,
    is_shut_down: bool,
    said: str,
) -> None:
    ended: list[bool] = []

    def deploy(path: Path) -> None:
        raise ends

    monkeypatch.setenv("RAY_ADDRESS", address)
    monkeypatch.setattr(ray, "init", lambda **_: None)
    monkeypatch.setattr(Sigterm, "interrupts", lambda self: None)
    monkeypatch.setattr(deployment, "use_json_console", lambda: None)
    monkeypatch.setattr(deployment, "deploy", deploy)
    monkeypatch.setattr(serve, "shutdown", lambda: ended.append(True))
    assert run(CONFIG, dashboard=False) == code
    assert bool(ended) is is_shut_down
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("before", "after", "says"),
    [
        ("proxy_location:", "proxy_locatoin:", "proxy_locatoin: no such option of Serve; did you mean proxy_location?"),
        ("proxy_location: HeadOnly", "proxy_location: Moon", "proxy_location: "),
    ],
)
def test_a_mistake_in_serves_part_is_told_before_anything_is_deployed(
    before: str,
    after: str,
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(ray, "init", lambda **_: None)
    monkeypatch.setattr(Sigterm, "interrupts", lambda self: None)
    monkeypatch.setattr(deployment, "use_json_console", lambda: None)
    monkeypatch.setattr(deployment, "deploy", lambda path: pytest.fail("nothing is deployed"))
    file = tmp_path / "serve.yaml"
    text = CONFIG.read_text()
    assert before in text
    file.write_text(text.replace(before, after))
    assert run(file, dashboard=False) == 2
    assert capsys.readouterr().err.startswith(f"manta: error: {file}: {says}")


def test_a_failed_deployment_ends_the_command(tmp_path: Path) -> None:
    environ = {**os.environ, "RAY_TMPDIR": tempfile.mkdtemp(prefix="mnt", dir="/tmp"), "RAY_ADDRESS": "local"}
    for name in SERVE_PORTS:
        environ[name] = str(free_port())
    words = ["serve", "tiny-chat", "--ingress-api-keys-file", str(tmp_path / "none"), "--skip-preflight",
             "--port", str(free_port()), "-o", str(tmp_path / "serve.yaml")]  # fmt: skip
    command = [sys.executable, "-m", "app.cli", *words]
    done = subprocess.run(
        command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=patience_s(), check=False
    )
    assert done.returncode == 1
    lines = (done.stdout + done.stderr).splitlines()
    assert any("ERROR manta.serve: the application cannot start: api_keys_file: cannot read" in line for line in lines)
    (last,) = [line for line in lines if line.startswith("manta: error: ")]
    assert "application 'manta' cannot start: ConfigError: api_keys_file: cannot read" in last


def copies_with_ray(server: int) -> set[str]:
    """The titles of worker processes that are copies of one which has imported Ray."""
    titles = set()
    for process in psutil.Process(server).children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            title, template = " ".join(process.cmdline()).strip(), process.parent()
            if template is None or "app.cli.worker_template" not in template.cmdline():
                continue
            if any("_raylet" in region.path for region in template.memory_maps()):
                titles.add(title.partition(".")[0])
    return titles


@pytest.mark.slow
def test_sigterm_ends_as_quietly_as_ctrl_c(tmp_path: Path) -> None:
    environ = {**os.environ, "RAY_TMPDIR": tempfile.mkdtemp(prefix="mnt", dir="/tmp"), "RAY_ADDRESS": "local"}
    environ |= {name: str(free_port()) for name in SERVE_PORTS}
    port, log = free_port(), tmp_path / "log"
    words = ["serve", "tiny-chat", "--port", str(port), "-o", str(tmp_path / "serve.yaml")]
    with log.open("w") as output:
        server = subprocess.Popen(
            [sys.executable, "-m", "app.cli", *words], cwd=ROOT, env=environ, stdout=output, stderr=subprocess.STDOUT
        )
    try:
        wait_until(lambda: "open at http" in log.read_text(), "the server has started")
        copies = {"ray::ServeController", "ray::ServeReplica:manta:Router", "ray::WorkerActor"}
        assert copies <= copies_with_ray(server.pid)
        server.send_signal(signal.SIGTERM)
        assert server.wait(patience_s()) == 0
    finally:
        server.kill()
    assert "manta: shutting down" in log.read_text()
    assert "SIGTERM received" not in log.read_text()
    assert "Traceback" not in log.read_text()


def test_sigterm_interrupts_once() -> None:
    before = signal.getsignal(signal.SIGTERM)
    sigterm = Sigterm()
    try:
        sigterm.interrupts()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        assert sigterm.came
    finally:
        signal.signal(signal.SIGTERM, before)
