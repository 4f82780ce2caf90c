"""What the application may use, as the commands find it."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest

from app.cli import machine
from app.cli.cluster import TOKEN_VARIABLES
from app.cli.command import CommandError
from app.cli.machine import find_machine, this_machine
from benchmarks.serve_process import free_port
from tests.limits import patience_s, wait_until


def test_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "local")
    found = find_machine()
    assert found.cluster is None
    assert found.cpus == os.cpu_count()
    assert found.free_bytes is not None
    assert 0 < found.free_bytes <= psutil.virtual_memory().total


@pytest.mark.parametrize(("visible", "count"), [("", 0), ("0", 1), ("2,3", 2), ("-1", 0)])
def test_visible_gpus(monkeypatch: pytest.MonkeyPatch, visible: str, count: int) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert this_machine().gpus == count


def test_the_containers_limit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(machine, "CGROUP_LIMIT", tmp_path / "memory.max")
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("400000\n")
    assert this_machine().free_bytes == 600000
    (tmp_path / "memory.max").write_text("max\n")
    assert (this_machine().free_bytes or 0) > 1000000


def test_what_a_killed_cluster_left_behind(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "ray_current_cluster").write_text("127.0.0.1:9\n")
    assert find_machine().cluster is None
    assert "where none answers" in capsys.readouterr().err


def test_nobody_at_the_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:9")
    with pytest.raises(CommandError, match=r"no Ray cluster answers at 127\.0\.0\.1:9"):
        find_machine()


@pytest.mark.slow
def test_a_cluster(tmp_path: Path) -> None:
    """One that `ray start` made, closed by a token: joined by who has it, and refused in one line to who has not."""
    folder = Path(tempfile.mkdtemp(prefix="mnt", dir="/tmp"))
    port, bare = free_port(), {**os.environ, "HOME": str(folder), "RAY_TMPDIR": str(folder)}
    for name in ("RAY_ADDRESS", "RAY_AUTH_MODE", *TOKEN_VARIABLES):
        bare.pop(name, None)
    token = {**bare, "RAY_AUTH_TOKEN": secrets.token_hex(16)}
    head = ["-m", "ray.scripts.scripts", "start", "--head", f"--port={port}", "--num-cpus=1", "--block",
            "--include-dashboard=false"]  # fmt: skip
    with (tmp_path / "head.log").open("wb") as log:
        process = subprocess.Popen([sys.executable, *head], env=token, stdout=log, stderr=log)
    try:
        note = folder / "ray" / "ray_current_cluster"
        wait_until(note.exists, "the cluster", calm_s=60.0)

        def serve(environ: dict[str, str]) -> subprocess.CompletedProcess[str]:
            command = [sys.executable, "-m", "app.cli", "serve", "--dry-run"]
            return subprocess.run(
                command, env=environ, capture_output=True, text=True, timeout=patience_s(), check=False
            )

        joined = serve(token)
        assert (joined.returncode, joined.stderr.count("\n")) == (0, 1), joined.stderr  # a dry run only tells it
        assert joined.stderr.startswith("note: the application needs 1.1 CPUs, the Ray cluster at ")
        assert "has 1: lower cpus_per_worker" in joined.stderr
        for environ, says in (
            (bare, "this machine has none: put what `ray get-auth-token` prints"),
            ({**bare, "RAY_AUTH_TOKEN": secrets.token_hex(16)}, "this machine's is another"),
            ({**token, "RAY_AUTH_MODE": "disabled"}, "unset RAY_AUTH_MODE"),
        ):
            refused = serve(environ)
            assert (refused.returncode, refused.stderr.count("\n")) == (1, 1), refused.stderr
            assert "asks for a token" in refused.stderr
            assert says in refused.stderr
    finally:
        for each in [*psutil.Process(process.pid).children(recursive=True), process]:
            with contextlib.suppress(psutil.Error, ProcessLookupError):
                each.kill()
        process.wait()
        shutil.rmtree(folder, ignore_errors=True)
