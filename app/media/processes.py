"""Processes that decode for a server: a few, each started when it is needed first, killed when a file is too much."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Mapping
from typing import Any

from app.errors import InvalidRequestError, OverloadedError
from app.limited_process import TOO_BUSY, LimitedProcess

# Nothing of ours is in the environment of a process that reads what strangers send; its threads would count as memory.
# glibc keeps so much of what was freed: what a picture of 1,024 x 1,024 takes is not given back and faulted in again
# for the next one, which costs more than to decode it.
_KEPT = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TOP_PAD_": str(12 << 20)}
ENVIRONMENT = {"PATH": os.defpath, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", **_KEPT}


class ProcessPool:
    """At most `most` processes of a module; `memory_bytes` bound each. May be called from any thread."""

    def __init__(self, module: str, most: int, memory_bytes: int) -> None:
        self._module = module
        self._memory_bytes = memory_bytes
        self._free: list[LimitedProcess] = []
        self._places = threading.Semaphore(most)
        self._is_closed = False

    def ask(self, job: Mapping[str, Any], data: bytes, timeout_s: float) -> tuple[dict[str, Any], memoryview]:
        """Returns what a process says of a file, and the bytes that it made of it; blocks until one is free and done.

        InvalidRequestError where it refuses the file or the job is too much for it, OverloadedError where none could be
        had; the messages go on behind the name of the field.
        """
        asked = bytearray(json.dumps({**job, "most_s": timeout_s}).encode() + b"\n")
        asked += data
        with self._places:
            answer = self._ask(asked, timeout_s)
        end = answer.find(b"\n") + 1 or len(answer)
        said: dict[str, Any] = json.loads(answer[:end])
        if "error" in said:
            raise InvalidRequestError(said["error"])
        return said, memoryview(answer)[end:]

    def _ask(self, job: bytearray, timeout_s: float) -> bytearray:
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
