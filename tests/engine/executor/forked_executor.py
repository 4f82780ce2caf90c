"""Local worker processes that cost a fork instead of a start of Python and torch, for tests with many of them."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from typing import Any

from app.config.engine import EngineConfig
from app.engine.executor.local_processes import LocalProcessesExecutor
from app.engine.executor.local_worker import serve
from app.records.step import SchedulerOutput
from app.worker.graphs.graph_setup import GraphSetup
from app.worker.graphs.static_step import Static, StaticStep
from app.worker.model_runner import ModelRunner
from app.worker.rows.pending_step import StepClock, StepResults

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    ["app.worker.worker", "app.engine.executor.local_worker", __name__, "tests.engine.executor.fake_worker"]
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
    ordinary = ModelRunner._run
    init = GraphSetup.__init__

    def keep_parts(setup: GraphSetup, config: EngineConfig, *parts: Any, **options: Any) -> None:
        init(setup, config, *parts, **options)
        drafts = {name: options[name] for name in ("draft_counts", "drafting")}
        setup.step = StaticStep(parts[0], parts[1], parts[3], [1, 2, 4, 8, 16], **drafts)

    def run_uncaptured(setup: GraphSetup) -> Static | None:
        return setup.step

    def refuse_decodes(runner: ModelRunner, step_message: SchedulerOutput, clock: StepClock) -> StepResults:
        counts, drafts = step_message.num_scheduled_tokens, step_message.num_draft_tokens
        decodes = step_message.samples.all() and ((counts if drafts is None else counts - drafts) == 1).all()
        assert runner._static is None or not decodes, "a step that only decodes is to be static"
        return ordinary(runner, step_message, clock)

    GraphSetup.__init__ = keep_parts  # type: ignore[method-assign]
    GraphSetup.capture = run_uncaptured  # type: ignore[method-assign]
    ModelRunner._run = refuse_decodes  # type: ignore[method-assign]
    serve(*arguments)
