"""Tries grammars in a process of their own, with limits on time and memory; one that misbehaves costs that process.

Compiling is deterministic: what the sandbox got through in time, the engine gets through in time.
"""

from __future__ import annotations

import json
import os
import threading

from app.errors import InvalidRequestError, OverloadedError
from app.limited_process import TOO_BUSY, LimitedProcess
from app.structured.limits import GrammarLimits
from app.structured.structured_outputs import StructuredOutputs
from app.structured.vocabulary import VocabularySource

MODULE = "app.structured.sandbox_process"


class SandboxedCompile:
    """`check` may be called from any thread; one grammar is tried at a time. The process starts with the first."""

    def __init__(self, source: VocabularySource, limits: GrammarLimits) -> None:
        self._source = source
        self._limits = limits
        self._lock = threading.Lock()
        self._process: LimitedProcess | None = None
        self._spare: LimitedProcess | None = None  # for when a grammar costs us the other; once one has

    def check(self, spec: StructuredOutputs) -> None:
        """InvalidRequestError when the grammar is wrong or too much work; OverloadedError when no sandbox is free."""
        field = f"structured_outputs.{spec.kind}"
        asked = spec.model_dump_json(by_alias=True, exclude_defaults=True).encode("utf-8", "surrogatepass")
        with self._lock:
            process = self._ready_process()
            answer, ended = process.ask(asked, self._limits.timeout_s)
            if ended is not None:
                process.kill()
                # From now on a spare one is kept: it comes up while nobody waits for it.
                self._process, self._spare = self._spare or self._start(), self._start()
        if ended == TOO_BUSY:
            raise OverloadedError(f"{field}: {TOO_BUSY} to try the grammar; try later")
        if ended is not None:
            raise InvalidRequestError(f"{field}: too complex: compiling it {ended}", param=field)
        verdict = json.loads(answer)
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

    def _ready_process(self) -> LimitedProcess:
        for _ in range(2):  # the second for one that died since the last grammar
            if self._process is None:
                self._process = self._start()
            if self._process.wait_ready():
                return self._process
            self._process.kill()
            self._process = None
        raise OverloadedError("structured_outputs: the process that tries grammars does not start; try later")

    def _start(self) -> LimitedProcess:
        # The library's threads would only count against the memory.
        environment = {**os.environ, "RAYON_NUM_THREADS": "1"}
        return LimitedProcess(MODULE, self._source.recipe(), self._limits.memory_bytes, environment)
