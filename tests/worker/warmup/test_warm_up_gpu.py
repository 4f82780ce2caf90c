"""After a start with an empty Triton cache no ordinary request waits for a kernel."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_architecture import ROOT


@pytest.mark.gpu
@pytest.mark.parametrize("shape", ["llama-100m", "dsv2lite-3", "llama-8b-gptq-2", "llama-8b-int8-2", "llama-100m 8 40"])
def test_traffic_compiles_nothing(shape: str, tmp_path: Path) -> None:
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "tests.worker.kernels_after_start", *shape.split()]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    lines = [line.split() for line in done.stdout.splitlines() if line.startswith(("BEFORE", "AFTER"))]
    assert int(lines[0][1]) > 20
    assert lines[1:] == []
