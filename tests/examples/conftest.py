"""One server for all examples that need one: that of several_models.yaml, whose default is the quickstart's model.

The package of plugins (examples/plugin) is installed beside it, into a folder of its own, and used by the server.
"""

from __future__ import annotations

import os
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.serve_process import ROOT, ServeProcess
from tests import limits

RunExample = Callable[..., str]


@pytest.fixture(scope="session")
def plugin_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where pip has installed examples/plugin; no network is asked."""
    source, target = tmp_path_factory.mktemp("source") / "plugin", tmp_path_factory.mktemp("installed")
    shutil.copytree(
        ROOT / "examples/plugin", source, ignore=shutil.ignore_patterns("build", "*.egg-info", "__pycache__")
    )
    options = ("--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check", "--quiet")
    command = [sys.executable, "-m", "pip", "install", *options, "--target", str(target), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=limits.patience_s(), check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return target


@pytest.fixture(scope="session")
def stats_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the stat logger of the package writes to."""
    return tmp_path_factory.mktemp("stats") / "stats.csv"


@pytest.fixture(scope="session")
def server(plugin_folder: Path, stats_file: Path) -> Iterator[ServeProcess]:
    def edit(config: dict[str, Any]) -> None:
        args = config["applications"][0]["args"]
        args["router"] = {"policy": "example_sticky"}
        args["models"][0] |= {"stat_loggers": ["example_csv"], "stat_logger_interval_s": 1.0}
        args["models"][1]["engine"] |= {"quantization": "example_int8", "attention_backend": "example_gather"}

    with ServeProcess(
        ROOT / "examples/several_models.yaml",
        edit,
        ready_timeout_s=limits.patience_s(),
        ends_gracefully=False,
        environ={"PYTHONPATH": f"{ROOT}{os.pathsep}{plugin_folder}", "EXAMPLE_STATS_FILE": str(stats_file)},
    ) as running:
        yield running


@pytest.fixture
def run_example() -> RunExample:
    """Runs an example as its reader would; what it printed."""

    def run(name: str, *arguments: str, expected_status: int = 0) -> str:
        env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [sys.executable, f"examples/{name}.py", *arguments],
            cwd=ROOT, env=env, capture_output=True, text=True, timeout=limits.patience_s(), check=False,
        )  # fmt: skip
        assert done.returncode == expected_status, done.stdout + done.stderr
        return done.stdout + done.stderr

    return run


@pytest.fixture
def run_here(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> RunExample:
    """The same in this process, which has imported PyTorch and the SDKs; one example of each kind has its own."""

    def run(name: str, *arguments: str) -> str:
        path = ROOT / f"examples/{name}.py"
        monkeypatch.setattr(sys, "argv", [str(path), *arguments])
        runpy.run_path(str(path), run_name="__main__")
        return "".join(capfd.readouterr())

    return run
