"""Processes that decode for a server: a few, each started when it is needed first, killed when a file is too much."""

from __future__ import annotations

import os
import threading

from app.errors import InvalidRequestError, OverloadedError
from app.limited_process import TOO_BUSY, LimitedProcess

# Nothing of ours is in the environment of a process that reads what strangers send; its threads would count as memory.
ENVIRONMENT = {"PATH": os.defpath, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}


class ProcessPool:
    """At most `most` processes of a module; `memory_bytes` bound each. May be called from any thread."""

    def __init__(self, module: str, most: int, memory_bytes: int) -> None:
        self._module = module
        self._memory_bytes = memory_bytes
        self._free: list[LimitedProcess] = []
        self._places = threading.Semaphore(most)
        self._is_closed = False

    def ask(self, job: bytes | bytearray, timeout_s: float) -> bytes:
        """A process's answer; blocks until one is free and done.

        InvalidRequestError where the job is too much for it, OverloadedError where none could be had; the messages go
        on behind the name of the field.
        """
        with self._places:
            return self._ask(job, timeout_s)

    def _ask(self, job: bytes | bytearray, timeout_s: float) -> bytes:
        process = self._ready()
        answer, ended = process.ask(job, timeout_s)
        if ended is None:
            self._give_back(process)
            return answer
        process.kill()
        if ended == TOO_BUSY:
            raise OverloadedError(f"was not decoded: {TOO_BUSY}; try later")
        raise InvalidRequestError(f"is too much work: decoding it {ended}")

    def _ready(self) -> LimitedProcess:
        """A process that can be asked."""
        while self._free:
            process = self._free.pop()
            if process.wait_ready():
                return process
            process.kill()
        process = LimitedProcess(self._module, (), self._memory_bytes, ENVIRONMENT)
        if not process.wait_ready():
            process.kill()
            raise OverloadedError("was not decoded: the process for it does not start; try later")
        return process

    def _give_back(self, process: LimitedProcess) -> None:
        if self._is_closed:
            process.kill()
        else:
            self._free.append(process)

    def close(self) -> None:
        """End the processes; idempotent."""
        self._is_closed = True
        while self._free:
            self._free.pop().kill()
