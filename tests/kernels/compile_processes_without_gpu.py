"""`compile_ahead` where processes compile for its threads, with Triton's real compiler for a GPU of compute capability
9.0 and a driver that runs nothing. Run by test_compile_processes.py in a process of its own.

Exits 1 with a traceback if something is not as it should be.
"""

from __future__ import annotations

import os
import signal

import torch
import triton
from triton import knobs

from app.kernels import compile_processes
from app.kernels.compile_ahead import compile_ahead
from tests.kernels.compile_ahead_without_gpu import (
    CPU,
    Driver,
    broken_kernel,
    call_kernel,
    double_kernel,
    doubled,
)


def hits_of_a_kernel_whose_key_depends_on_the_order() -> list[bool]:
    """Of a process that found another key by itself."""
    hits = list[bool]()
    knobs.compilation.listener = lambda *, cache_hit, **_: hits.append(cache_hit)
    _ = doubled.cache_key  # before that of its caller, so the caller's is another one
    with compile_ahead(CPU) as ahead:
        call_kernel[(1,)](torch.zeros(64), BN=16)
    assert (ahead.compiled, ahead.failed) == (1, 0), ahead
    return hits


def launch(size: int) -> None:
    """Two kernels, one of which cannot be compiled."""
    double_kernel[(1,)](torch.zeros(64), 33, BN=size)
    broken_kernel[(1,)](torch.zeros(64), BN=size)


def hits_of(size: int) -> list[bool]:
    """Whether each kernel of a start was on the disk when a thread of this process wanted it."""
    hits = list[bool]()
    knobs.compilation.listener = lambda *, cache_hit, **_: hits.append(cache_hit)
    with compile_ahead(CPU) as ahead:
        launch(size)
    assert (ahead.compiled, ahead.failed) == (1, 1), ahead
    return hits


def let_go_of(read: int, write: int) -> None:
    """No forked process keeps a pipe of this one open: raises BlockingIOError where one does."""
    os.close(write)
    compiler = compile_processes.new_compiler()
    assert compiler is not None
    compiler.compile(b"no kernel")
    os.set_blocking(read, False)
    assert not os.read(read, 1), "the pipe's end"


def main() -> None:
    """All in one, as kernels of one process know of each other."""
    triton.runtime.driver.set_active(Driver())
    assert hits_of(16) == [False], "nobody compiled it before"

    compile_processes._has_gpu = lambda: True
    read, write = os.pipe()
    compile_processes.begin()
    assert compile_processes._control is not None
    let_go_of(read, write)
    _, number = compile_processes._control
    assert hits_of(32) == [True], "a process has"
    assert compile_processes._control is None
    assert not os.path.exists(f"/proc/{number}"), "they end with the start"

    compile_processes.begin()
    assert hits_of_a_kernel_whose_key_depends_on_the_order() == [True]

    compile_processes.begin()
    asked = list[bytes]()
    ask = compile_processes.Compiler.compile
    compile_processes.Compiler.compile = lambda self, source: (asked.append(source), ask(self, source))[1]
    with compile_ahead(CPU):
        double_kernel.device_caches.clear()
        double_kernel[(1,)](torch.zeros(64), 33, BN=32)
    assert not asked, "what is on the disk is read there"

    compile_processes.begin()
    _, number = compile_processes._control
    os.kill(number, signal.SIGKILL)
    assert hits_of(64) == [False], "where none is left, threads compile"
    assert hits_of(128) == [False]
    print("all as it should be")


if __name__ == "__main__":
    main()
