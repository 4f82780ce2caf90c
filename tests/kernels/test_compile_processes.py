"""Processes compile kernels for a start's threads; what they cannot, the threads do."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from app.kernels import compile_processes
from app.kernels.compile_processes import begin, described, new_compiler
from tests.test_architecture import ROOT


def test_a_start_takes_kernels_from_processes(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.kernels.compile_processes_without_gpu"]
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]


@pytest.mark.parametrize(("has_gpu", "threads", "in_use"), [(False, 1, False), (True, 2, False), (True, 1, True)])
def test_none_is_forked_without_a_gpu_beside_threads_or_with_a_gpu_in_use(
    monkeypatch: pytest.MonkeyPatch, has_gpu: bool, threads: int, in_use: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: in_use)
    monkeypatch.setattr(compile_processes, "_has_gpu", lambda: has_gpu)
    monkeypatch.setattr(threading, "active_count", lambda: threads)
    monkeypatch.setattr(os, "fork", lambda: pytest.fail("forked"))
    begin()
    assert new_compiler() is None


def test_a_kernel_that_has_no_name_is_not_sent() -> None:
    def kernel() -> None:
        raise AssertionError

    function: Any = SimpleNamespace(fn=kernel, ASTSource=SimpleNamespace)
    with pytest.raises(ValueError, match="kernel"):
        described(function, None, {}, {}, SimpleNamespace(), {})
