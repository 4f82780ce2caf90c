"""Triton kernels compiled side by side, before anyone needs them.

A kernel is compiled when it is first launched, and a launch waits for it: a start that meets some sixty kernels one
after another takes some sixty times 0.3 s. Inside `compile_ahead` launches only say which kernels there will be. Nearly
all of a compilation is native code that lets other Python threads run, so threads are enough.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from triton.runtime.jit import JITFunction

logger = logging.getLogger("manta.kernels")

MOST_THREADS = 32
_one_at_a_time = threading.Lock()  # in a process: Triton's launch is replaced meanwhile


@dataclass(slots=True)
class Ahead:
    """What came of it; counted when the block has ended."""

    compiled: int = 0  # or read from Triton's cache on disk
    failed: int = 0


@dataclass(slots=True, frozen=True)
class _Kernel:
    """One that is being made. It stands in Triton's table of a function's kernels until the real one does."""

    table: dict[Any, Any]
    key: Any
    done: Future[None]

    def settle(self) -> bool:
        """Wait; whether it is there. One that failed leaves no trace: the next launch fails as it always did."""
        error = self.done.exception()
        if error is not None:
            logger.debug("a kernel was not compiled ahead", exc_info=error)
            self.table.pop(self.key, None)
        return error is None


@contextmanager
def compile_ahead(device: torch.device) -> Iterator[Ahead]:
    """Within the block, this thread's launches compile their kernels for `device` in a pool and run nothing: what they
    would have written stays as it was, mostly uninitialised. The block's end waits for all of them to be loaded.

    Raises what the block raises; a kernel that cannot be compiled or loaded is only counted. Launches of other threads
    are what they always are. In Triton's interpreter nothing is changed.
    """
    ahead, kernels = Ahead(), list[_Kernel]()
    me, run, make = threading.get_ident(), JITFunction.run, JITFunction._do_compile

    def run_nothing(function: Any, *arguments: Any, grid: Any, warmup: bool, **keywords: Any) -> Any:
        is_mine = threading.get_ident() == me
        return run(function, *arguments, grid=grid, warmup=warmup or is_mine, **keywords)

    def make_later(function: Any, key: Any, *details: Any, **keywords: Any) -> Any:
        if threading.get_ident() != me:
            return make(function, key, *details, **keywords)
        # Here, and not in several threads at once: it fills tables that launches read.
        _ = function.cache_key
        table = function.device_caches[_device_of(*details, **keywords)][0]
        done = pool.submit(lambda: _load(make(function, key, *details, **keywords)))
        table[key] = made = _Kernel(table, key, done)
        kernels.append(made)
        return made

    threads = min(MOST_THREADS, len(os.sched_getaffinity(0)))
    with _one_at_a_time, ThreadPoolExecutor(threads, "compile", _enter, (device,)) as pool:
        JITFunction.run, JITFunction._do_compile = run_nothing, make_later
        try:
            yield ahead
        finally:
            JITFunction.run, JITFunction._do_compile = run, make
            ahead.compiled = sum(kernel.settle() for kernel in kernels)
            ahead.failed = len(kernels) - ahead.compiled


def _enter(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.set_device(device)


def _device_of(signature: Any, device: Any, *_: Any, **__: Any) -> Any:
    """Of the arguments of JITFunction._do_compile after the key: Triton's number of the device."""
    return device


def _load(kernel: Any) -> None:
    """What the first launch would do: Triton 3.6 compiles a launcher too, by the C compiler."""
    assert kernel is not None, "a hook of Triton's compiles it elsewhere"
    _ = kernel.run
