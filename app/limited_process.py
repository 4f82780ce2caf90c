"""A process of its own for what a client's input makes dangerous: limits on memory and time, and it may be killed.

Requests and answers are bytes, one answer for each request, over the process's standard input and output. The parent's
half is `LimitedProcess`, the process's own `serve`.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import resource
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[1]
START_TIMEOUT_S = 60.0  # for a process to come up, on a machine that is busy with something else
# The time limit counts the process's own CPU time, or a busy machine would refuse what is easy; and so many times as
# much on the clock.
PATIENCE = 10
TOO_BUSY = "the machine is too busy"  # says nothing of the request, so nobody remembers it
ORPHAN_S = 30  # a request that nobody waits for any more, as the parent is gone, ends the process after so long
_READY = b"ready"
_LENGTH_BYTES = 8
_PIPE_BYTES = 1 << 20  # that a pipe holds, where the system lets it: a picture's pixels go through in few pieces
LOOK_S = 0.05  # between looks at the time that is left


class LimitedProcess:
    """One child process, `python -m module arguments`, which is asked one thing at a time."""

    def __init__(
        self, module: str, arguments: Sequence[str], memory_bytes: int, environment: Mapping[str, str] | None = None
    ) -> None:
        inherited = os.environ if environment is None else environment
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        self._memory_bytes = memory_bytes
        self._child = subprocess.Popen(
            [sys.executable, "-m", module, str(memory_bytes), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**inherited, "PYTHONPATH": os.pathsep.join(paths)},
            start_new_session=True,
        )
        assert self._child.stdout is not None
        os.set_blocking(self._child.stdout.fileno(), False)
        for pipe in (self._child.stdin, self._child.stdout):
            assert pipe is not None
            with contextlib.suppress(OSError, AttributeError):
                fcntl.fcntl(pipe.fileno(), fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        self._is_ready = False
        self._times = psutil.Process(self._child.pid)

    def wait_ready(self) -> bool:
        """Waits until it has started; True if it can be asked."""
        if self._child.poll() is not None:
            return False
        if not self._is_ready:
            deadline = time.monotonic() + START_TIMEOUT_S
            answer = self._read_answer(lambda: deadline - time.monotonic())
            self._is_ready = answer is not None and bytes(answer) == _READY
        return self._is_ready

    def ask(self, request: bytes | bytearray, timeout_s: float, spent_s: float = 0.0) -> tuple[bytearray, str | None]:
        """(answer, None), or (nothing, what happened) when there is none and the process is of no use any more.
        `spent_s`: what earlier requests of the same work took of its time."""
        assert self._child.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._child.stdin.write(len(request).to_bytes(_LENGTH_BYTES, "little"))
            self._child.stdin.write(request)
            self._child.stdin.flush()
        left_s = max(0.0, timeout_s - spent_s)
        until_cpu_s, until = self.cpu_s() + left_s, time.monotonic() + PATIENCE * left_s
        try:
            answer = self._read_answer(lambda: min(until_cpu_s - self.cpu_s(), until - time.monotonic()))
        except EOFError:
            return bytearray(), f"takes more than {self._memory_bytes >> 20} MiB, or more stack than there is"
        if answer is None:
            is_proven = until_cpu_s <= self.cpu_s()
            return bytearray(), f"takes more than {timeout_s:g} s" if is_proven else TOO_BUSY
        return answer, None

    def cpu_s(self) -> float:
        """CPU time that the child has taken; 0 once it is gone, which its pipe tells."""
        try:
            times = self._times.cpu_times()
        except psutil.Error:
            return 0.0
        return float(times.user + times.system)

    def _read_answer(self, left_s: Callable[[], float]) -> bytearray | None:
        """The next answer; None when no time is left, EOFError when the process has ended or says what it cannot."""
        with selectors.DefaultSelector() as selector:
            assert self._child.stdout is not None
            selector.register(self._child.stdout, selectors.EVENT_READ)
            length = self._filled(bytearray(_LENGTH_BYTES), selector, left_s)
            if length is None:
                return None
            count = int.from_bytes(length, "little")
            if count > self._memory_bytes:  # more than it may hold
                raise EOFError
            return self._filled(bytearray(count), selector, left_s)

    def _filled(
        self, buffer: bytearray, selector: selectors.BaseSelector, left_s: Callable[[], float]
    ) -> bytearray | None:
        """The buffer once it is full; None and EOFError as above."""
        assert self._child.stdout is not None
        descriptor, rest = self._child.stdout.fileno(), memoryview(buffer)
        left, looked = left_s(), time.monotonic()
        while rest:
            if left <= 0:
                return None
            has_more = selector.select(min(left, LOOK_S))
            if not has_more or time.monotonic() - looked > LOOK_S:  # to look costs as much as some pieces
                left, looked = left_s(), time.monotonic()
            if not has_more:
                continue
            count = os.readv(descriptor, [rest])
            if not count:
                raise EOFError
            rest = rest[count:]
        return buffer

    def kill(self) -> None:
        """Kill the process."""
        self._child.kill()
        self._child.wait()
        for pipe in (self._child.stdin, self._child.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()


def serve(memory_bytes: int, answer: Callable[[bytes], bytes | bytearray]) -> None:
    """Answer requests until the input ends, in a process that has loaded what it needs: `memory_bytes` are what it may
    take beyond that."""
    limit = psutil.Process().memory_info().vms + memory_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.nice(5)  # the engine's steps come first where cores are few
    _write(_READY)
    while length := sys.stdin.buffer.read(_LENGTH_BYTES):
        request = sys.stdin.buffer.read(int.from_bytes(length, "little"))
        signal.alarm(ORPHAN_S)
        _write(answer(request))
        signal.alarm(0)


def allow(seconds: float) -> None:
    """Let the request that is being answered take so much CPU time, where that is more than an orphan gets."""
    signal.alarm(max(ORPHAN_S, math.ceil(seconds * PATIENCE)))


def _write(answer: bytes | bytearray) -> None:
    out = sys.stdout.buffer
    out.write(len(answer).to_bytes(_LENGTH_BYTES, "little"))
    out.write(answer)
    out.flush()
