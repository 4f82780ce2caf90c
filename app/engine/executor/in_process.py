"""The executor without Ray: one worker in this process, stepped by the caller's own thread.

A submitted step message is executed at once; its outputs wait until they are collected, so the order of step messages
and outputs is that of any other executor (I2).
"""

from __future__ import annotations

import sys
import threading
from collections import deque
from typing import Any

from app.config.engine import EngineConfig
from app.engine.executor.base import Executor
from app.engine.executor.worker_group.phase import is_compiling
from app.errors import EngineDeadError, MantaError
from app.kernels import compile_processes
from app.records.step import ModelRunnerOutput, SchedulerOutput
from app.records.worker_info import WorkerInfo
from app.worker.worker import Worker


class InProcessExecutor(Executor):
    """One rank, used by `LLM` and by tests."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._worker: Worker | None = None
        self._outputs: deque[list[ModelRunnerOutput]] = deque()
        self._death: str | None = None
        self._thread: int | None = None  # that executes a step

    def start(self) -> WorkerInfo:
        """Build the worker; ConfigError and CheckpointError come through unchanged."""
        assert self._worker is None, "started twice"
        compile_processes.begin()
        try:
            worker = Worker(self._config)
            info = worker.start()
        finally:
            compile_processes.end()  # of a start that failed, too
        self._worker = worker
        return info

    def submit(self, step_message: SchedulerOutput) -> None:
        """Execute the step message now (on a GPU: enqueue it)."""
        self.check_health()
        assert self._worker is not None
        self._thread = threading.get_ident()
        try:
            self._outputs.append(self._worker.execute(step_message))
        except Exception as error:
            self._death = f"step {step_message.step_id} failed in the worker: {type(error).__name__}: {error}"
            raise EngineDeadError(self._death) from error

    def collect(self) -> list[ModelRunnerOutput]:
        """Outputs of the oldest submitted call that was not collected yet."""
        self.check_health()
        assert self._outputs, "collect without a submitted step message"
        return self._outputs.popleft()

    def call(self, method: str, *arguments: Any) -> list[Any]:
        """Call it on this thread, for as long as it takes."""
        self.check_health()
        assert not self._outputs, f"{method} called with {len(self._outputs)} steps outstanding"
        try:
            return [getattr(self._worker, method)(*arguments)]
        except MantaError:
            raise
        except Exception as error:
            raise MantaError(f"{method}: {type(error).__name__}: {error}") from error

    def park(self) -> None:
        """Nothing spins here, so there is nothing to stop."""

    def check_health(self) -> None:
        """Raise EngineDeadError when a step failed or the executor is not running."""
        if self._death is not None:
            raise EngineDeadError(self._death)
        if self._worker is None:
            raise EngineDeadError("the executor is not running")

    def give_up_step(self, reason: str) -> None:
        """Nobody can end the step but the end of the process."""
        if self._thread is None or not is_compiling(sys._current_frames().get(self._thread)):
            raise EngineDeadError(reason)

    def shutdown(self) -> None:
        """Free the model and the KV cache."""
        if self._worker is not None:
            self._worker.shutdown()
            self._worker = None
        self._outputs.clear()
