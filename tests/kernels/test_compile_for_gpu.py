"""What the interpreter cannot tell: every Triton kernel compiles for an H200, bf16 included, and spills little; and for
AMD's MI300, down to its binary. A few of the latter in every run, all of both in `make acceptance`."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.test_architecture import ROOT


def compiled(*arguments: str) -> int:
    """Compile ahead of time; returns how many kernels there were."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.kernels.compile_for_gpu", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return int(done.stdout.splitlines()[-1].split()[0])


@pytest.mark.slow
@pytest.mark.parametrize("gpu", ["h200", "gfx942"])
def test_every_kernel_compiles_ahead_of_time(gpu: str) -> None:
    assert compiled(gpu) >= 50


def test_some_kernels_compile_for_amd() -> None:
    assert compiled("gfx942", "3", "2") == 3
