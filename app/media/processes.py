"""Processes that decode for a server: a few, each started when it is needed first, killed when a file is too much."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Generator, Mapping
from contextlib import closing
from typing import Any

from app.errors import InvalidRequestError, MantaError, OverloadedError
from app.limited_process import TOO_BUSY, LimitedProcess

_MORE = {"do": "more"}  # of what the last answer began
_END = {"do": "end"}  # nobody asks for more of it
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
        with closing(self.answers(job, data, timeout_s)) as answers:
            return next(answers)

    def answers(
        self, job: Mapping[str, Any], data: bytes, timeout_s: float
    ) -> Generator[tuple[dict[str, Any], memoryview]]:
        """The same of a job that a process answers in parts, all of them within `timeout_s`: while it says that there
        is `more`, it is asked for it. It is free once the last one came, or this is closed."""
        with self._places:
            process = self._ready()
            begin_s = process.cpu_s()
            asked, has_more, ended = _asked(job, data, timeout_s), True, None
            try:
                while has_more:
                    answer, ended = process.ask(asked, timeout_s, process.cpu_s() - begin_s)
                    if ended is not None:
                        raise _refusal(ended)
                    said, made = _read(answer)
                    asked, has_more = _asked(_MORE, b"", timeout_s), "more" in said
                    yield said, made
            except GeneratorExit:
                if has_more:  # or it would hold the file until the next one, beside that
                    _, ended = process.ask(_asked(_END, b"", timeout_s), timeout_s)
                raise
            finally:
                self._give_back(process, is_usable=ended is None)

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

    def _give_back(self, process: LimitedProcess, *, is_usable: bool) -> None:
        if self._is_closed or not is_usable:
            process.kill()
        else:
            self._free.append(process)

    def close(self) -> None:
        """End the processes; idempotent."""
        self._is_closed = True
        while self._free:
            self._free.pop().kill()


def _asked(job: Mapping[str, Any], data: bytes, timeout_s: float) -> bytearray:
    asked = bytearray(json.dumps({**job, "most_s": timeout_s}).encode() + b"\n")
    asked += data
    return asked


def _read(answer: bytearray) -> tuple[dict[str, Any], memoryview]:
    end = answer.find(b"\n") + 1 or len(answer)
    said: dict[str, Any] = json.loads(answer[:end])
    if "error" in said:
        raise InvalidRequestError(said["error"])
    return said, memoryview(answer)[end:]


def _refusal(ended: str) -> MantaError:
    if ended == TOO_BUSY:
        return OverloadedError(f"was not decoded: {TOO_BUSY}; try later")
    return InvalidRequestError(f"is too much work: decoding it {ended}")
