"""Processes compile kernels for a start's threads; what they cannot, the threads do."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from app.kernels import compile_processes
from app.kernels.compile_processes import Compiler, begin, described, new_compiler
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


def test_one_that_hangs_is_not_waited_for_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_processes, "LIMIT_S", 0.01)
    ours, theirs = socket.socketpair()
    with theirs:
        compiler = Compiler(ours)
        with pytest.raises(TimeoutError):
            compiler.compile(b"a kernel")
        with pytest.raises(OSError, match="descriptor"):
            compiler.compile(b"another")


def test_one_that_hangs_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the alarm of the process, which ends it in native code, too."""
    monkeypatch.setattr(compile_processes, "LIMIT_S", 1)
    monkeypatch.setattr(compile_processes, "_compile", lambda _: threading.Event().wait())
    ours, theirs = socket.socketpair()
    if (number := os.fork()) == 0:
        try:
            ours.close()
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            compile_processes._serve(theirs)
        finally:
            os._exit(1)
    theirs.close()
    with ours:
        ours.sendall(compile_processes._LENGTH.pack(1) + b"k")
        assert ours.recv(1) == b"", "it is gone"
    _, status = os.waitpid(number, 0)
    assert os.WTERMSIG(status) == signal.SIGALRM
