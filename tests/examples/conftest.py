"""One server for all examples that need one: that of several_models.yaml, whose default is the quickstart's model."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from benchmarks.serve_process import ROOT, ServeProcess
from tests import limits

RunExample = Callable[..., str]


@pytest.fixture(scope="session")
def server() -> Iterator[ServeProcess]:
    with ServeProcess(
        ROOT / "examples/several_models.yaml", ready_timeout_s=limits.patience_s(), ends_gracefully=False
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
