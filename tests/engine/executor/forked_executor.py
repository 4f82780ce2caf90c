"""Local worker processes that cost a fork instead of a start of Python and torch, for tests with many of them."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from typing import Any

from app.config import EngineConfig
from app.engine.executor.local_processes import LocalProcessesExecutor
from app.engine.executor.local_worker import serve
from app.engine.step import SchedulerOutput
from app.engine.worker.graphs.decode_step import Decode, DecodeStep
from app.engine.worker.graphs.graph_setup import GraphSetup
from app.engine.worker.model_runner import ModelRunner, _is_decode
from app.engine.worker.pending_step import StepResults

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    ["app.engine.worker.worker", "app.engine.executor.local_worker", __name__, "tests.engine.executor.fake_worker"]
)


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

    target: Callable[..., None] = staticmethod(serve)

    def _spawn(self, arguments: tuple[Any, ...]) -> Any:
        process = CONTEXT.Process(target=self.target, args=arguments, daemon=True)
        process.start()
        return ForkedProcess(process)


def serve_static(*arguments: Any) -> None:
    """A worker that decodes over static tensors, as one on a GPU does, without the capture."""
    dynamic = ModelRunner._dynamic

    init = GraphSetup.__init__

    def keep_parts(setup: GraphSetup, config: EngineConfig, *parts: Any, **options: Any) -> None:
        init(setup, config, *parts, **options)
        setup.step = DecodeStep(*parts[:2], [1, 2, 4, 8, 16])

    def run_uncaptured(setup: GraphSetup) -> Decode | None:
        return setup.step

    def refuse_decodes(runner: ModelRunner, step_message: SchedulerOutput) -> StepResults:
        assert runner._decode is None or not _is_decode(step_message), "a step that only decodes is to be static"
        return dynamic(runner, step_message)

    GraphSetup.__init__ = keep_parts  # type: ignore[method-assign]
    GraphSetup.capture = run_uncaptured  # type: ignore[method-assign]
    ModelRunner._dynamic = refuse_decodes  # type: ignore[method-assign]
    serve(*arguments)
