"""Local worker processes that cost a fork instead of a start of Python and torch, for tests with many of them."""

from __future__ import annotations

import multiprocessing
from multiprocessing.process import BaseProcess
from typing import Any

from app.engine.executor.local_processes import LocalProcessesExecutor
from app.engine.executor.local_worker import serve

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["app.engine.worker.worker", "app.engine.executor.local_worker", __name__])


class ForkedProcess:
    """subprocess.Popen's face on a process of multiprocessing."""

    def __init__(self, process: BaseProcess) -> None:
        self._process = process
        self.pid = process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()

    def wait(self) -> None:
        self._process.join()


class ForkedExecutor(LocalProcessesExecutor):
    """All else is as in LocalProcessesExecutor."""

    def _spawn(self, arguments: tuple[Any, ...]) -> Any:
        process = CONTEXT.Process(target=serve, args=arguments, daemon=True)
        process.start()
        return ForkedProcess(process)
