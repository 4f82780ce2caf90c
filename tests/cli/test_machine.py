"""What the application may use, as the commands find it."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import psutil
import pytest

from app.cli import machine
from app.cli.command import CommandError
from app.cli.machine import find_machine, this_machine
from tests.limits import patience_s


def test_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "local")
    found = find_machine()
    assert not found.is_cluster
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


def test_what_a_killed_cluster_left_behind(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "ray_current_cluster").write_text("127.0.0.1:9\n")
    assert not find_machine().is_cluster


def test_nobody_at_the_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:9")
    with pytest.raises(CommandError, match=r"no Ray cluster answers at 127\.0\.0\.1:9"):
        find_machine()


@pytest.mark.slow
def test_a_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a process of its own: this one may be connected to another cluster."""
    import subprocess
    import sys

    folder = tempfile.mkdtemp(prefix="mnt", dir="/tmp")
    code = (
        "import os, ray, subprocess, sys\n"
        f"ray.init(num_cpus=1, _temp_dir={folder!r}, include_dashboard=False)\n"
        "env = {**os.environ, 'RAY_ADDRESS': ray.get_runtime_context().gcs_address}\n"
        "done = subprocess.run([sys.executable, '-m', 'app.cli', 'serve'], env=env, capture_output=True, text=True)\n"
        "print(done.returncode, done.stderr)\n"
    )
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=patience_s()
    )
    assert "2 manta: error: the application needs 1.1 CPUs, the Ray cluster at " in done.stdout, done.stdout
    assert "has 1: lower num_replicas" in done.stdout
