"""Tries grammars in a process of their own, with limits on time and memory; one that misbehaves costs that process.

Compiling is deterministic: what the sandbox got through in time, the engine gets through in time.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from app.errors import InvalidRequestError, OverloadedError
from app.structured.limits import GrammarLimits
from app.structured.structured_outputs import StructuredOutputs
from app.structured.vocabulary import VocabularySource

ROOT = Path(__file__).resolve().parents[2]
START_TIMEOUT_S = 60.0  # for a process to come up, on a machine that is busy with something else
# The time limit counts the process's own CPU time, or a busy machine would refuse what is easy; and so many times as
# much on the clock.
PATIENCE = 10
NOT_TRIED = "the machine is too busy to try the grammar"  # says nothing of the grammar, so nobody remembers it


class SandboxedCompile:
    """`check` may be called from any thread; one grammar is tried at a time. The process starts with the first."""

    def __init__(self, source: VocabularySource, limits: GrammarLimits) -> None:
        self._source = source
        self._limits = limits
        self._lock = threading.Lock()
        self._process: _Process | None = None
        self._spare: _Process | None = None  # for when a grammar costs us the other; once one has

    def check(self, spec: StructuredOutputs) -> None:
        """InvalidRequestError when the grammar is wrong or too much work; OverloadedError when no sandbox is free."""
        field = f"structured_outputs.{spec.kind}"
        line = spec.model_dump_json(by_alias=True, exclude_defaults=True)
        with self._lock:
            process = self._ready_process()
            verdict, ended = process.ask(line, self._limits.timeout_s)
            if ended is not None:
                process.kill()
                # From now on a spare one is kept: it comes up while nobody waits for it.
                self._process, self._spare = self._spare or self._start(), self._start()
        if ended == NOT_TRIED:
            raise OverloadedError(f"{field}: {NOT_TRIED}; try later")
        if ended is not None:
            raise InvalidRequestError(f"{field}: too complex: compiling it {ended}", param=field)
        if verdict is not None:
            raise InvalidRequestError(verdict[1], param=verdict[0])

    def warm(self) -> None:
        """Start the process, without waiting for it."""
        with self._lock:
            if self._process is None:
                self._process = self._start()

    def close(self) -> None:
        """End the process; idempotent."""
        with self._lock:
            processes = [self._process, self._spare]
            self._process = self._spare = None
            for process in processes:
                if process is not None:
                    process.kill()

    def _ready_process(self) -> _Process:
        for _ in range(2):  # the second for one that died since the last grammar
            if self._process is None:
                self._process = self._start()
            if self._process.wait_ready():
                return self._process
            self._process.kill()
            self._process = None
        raise OverloadedError("structured_outputs: the process that tries grammars does not start; try later")

    def _start(self) -> _Process:
        memory_bytes = self._limits.memory_bytes
        return _Process([str(memory_bytes), *self._source.recipe()], memory_bytes)


class _Process:
    """One child process, which is asked one line at a time."""

    def __init__(self, arguments: list[str], memory_bytes: int) -> None:
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        # What the library may panic about is said in the verdict; its threads would only count against the memory.
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "RAYON_NUM_THREADS": "1"}
        self._memory_bytes = memory_bytes
        self._child = subprocess.Popen(
            [sys.executable, "-m", "app.structured.sandbox_process", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,
        )
        assert self._child.stdout is not None
        os.set_blocking(self._child.stdout.fileno(), False)
        self._is_ready = False

    def wait_ready(self) -> bool:
        """Waits until it has started; True if it can be asked."""
        if self._child.poll() is not None:
            return False
        if not self._is_ready:
            deadline = time.monotonic() + START_TIMEOUT_S
            self._is_ready = self._read_line(lambda: deadline - time.monotonic()) == b'"ready"\n'
        return self._is_ready

    def ask(self, line: str, timeout_s: float) -> tuple[list[str] | None, str | None]:
        """(verdict, None), or (None, what happened) when there is none and the process is of no use any more."""
        assert self._child.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._child.stdin.write(line.encode("utf-8", "surrogatepass") + b"\n")
            self._child.stdin.flush()
        until_cpu_s, until = self._cpu_s() + timeout_s, time.monotonic() + PATIENCE * timeout_s
        answer = self._read_line(lambda: min(until_cpu_s - self._cpu_s(), until - time.monotonic()))
        if answer is None:
            is_proven = until_cpu_s <= self._cpu_s()
            return None, f"takes more than {timeout_s:g} s" if is_proven else NOT_TRIED
        if not answer.endswith(b"\n"):
            return None, f"takes more than {self._memory_bytes >> 20} MiB, or more stack than there is"
        verdict: Any = json.loads(answer)
        return verdict, None

    def _cpu_s(self) -> float:
        """CPU time that the child has taken; 0 once it is gone, which its pipe tells."""
        try:
            times = psutil.Process(self._child.pid).cpu_times()
        except psutil.Error:
            return 0.0
        return float(times.user + times.system)

    def _read_line(self, left_s: Callable[[], float]) -> bytes | None:
        """A line; without its end when the process has ended; None when no time is left."""
        stdout = self._child.stdout
        assert stdout is not None
        read = b""
        with selectors.DefaultSelector() as selector:
            selector.register(stdout, selectors.EVENT_READ)
            while not read.endswith(b"\n"):
                left = left_s()
                if left <= 0:
                    return None
                if not selector.select(left):
                    continue
                piece = os.read(stdout.fileno(), 65536)
                if not piece:
                    break
                read += piece
        return read

    def kill(self) -> None:
        """Kill the process."""
        self._child.kill()
        self._child.wait()
        for pipe in (self._child.stdin, self._child.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
