"""Kernels are compiled in threads and not run; those that cannot be compiled fail when they are launched."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.test_architecture import ROOT


def test_launches_only_compile_within_the_block(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.kernels.compile_ahead_without_gpu"]
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
