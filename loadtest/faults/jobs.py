"""Several runs at a time: each job is a process with a network, a Ray cluster and a directory of its own."""

from __future__ import annotations

import multiprocessing
import signal
import sys
import traceback
from collections.abc import Iterator
from multiprocessing.connection import Connection, wait
from types import TracebackType

from loadtest.faults.mix import mixed
from loadtest.faults.nodes import enter_own_network
from loadtest.faults.plan import Plan, Task
from loadtest.faults.results import Run
from loadtest.faults.series import Series
from loadtest.faults.shapes import Shape
from loadtest.faults.table import FAULTS

_END_S = 60.0  # for a deployment to go


class Job:
    """One process that makes runs."""

    def __init__(self, label: str, num_tokens: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self._process = context.Process(target=_work, args=(theirs, label, num_tokens))
        self._process.start()
        theirs.close()
        self.task: Task | None = None
        self.shape: Shape | None = None

    def begin(self, task: Task | None) -> None:
        """Make this run next; with None, end the deployment: there is none to make."""
        self.task = task
        if task is None:
            self.connection.close()
        else:
            self.shape = task.fault.shape
            self.connection.send((task.fault.name, task.seed))

    def outcome(self) -> Run | str:
        """The run that has ended, or why there is none."""
        try:
            outcome: Run | str = self.connection.recv()
        except EOFError:
            self._process.join(_END_S)  # or it would seem alive, and be given a run
            return "the job's process has ended"
        return outcome

    def is_alive(self) -> bool:
        """Whether it can make a further run."""
        return self._process.is_alive()

    def end(self) -> None:
        """Ends its deployment too. One that has no run to make is ending it already, and must not be interrupted."""
        if self.connection.closed:
            self._process.join(_END_S)
        self._process.terminate()
        self._process.join(_END_S)
        self._process.kill()


class Jobs:
    """`with Jobs(...) as jobs: for task, outcome in jobs.run(plan): ...`"""

    def __init__(self, count: int, label: str, num_tokens: int) -> None:
        self._jobs = [Job(label, num_tokens) for _ in range(count)]

    def __enter__(self) -> Jobs:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for job in self._jobs:
            job.end()

    def run(self, plan: Plan) -> Iterator[tuple[Task, Run | str]]:
        """Each run of the plan as it ends; in its place, why it could not be made."""
        for job in self._jobs:
            job.begin(plan.take(None))
        while busy := {job.connection: job for job in self._jobs if job.task is not None}:
            for connection in wait(list(busy)):
                job = busy[connection]  # type: ignore[index]
                task, outcome = job.task, job.outcome()
                job.begin(plan.take(job.shape) if job.is_alive() else None)
                assert task is not None
                yield task, outcome


def _work(connection: Connection, label: str, num_tokens: int) -> None:
    """Make the runs that are asked for, until nobody asks any more."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))  # and the deployment with it
    enter_own_network()
    with Series(label, mixed(num_tokens)) as series:
        while True:
            try:
                name, seed = connection.recv()
            except EOFError:
                return
            connection.send(_made(series, name, seed))


def _made(series: Series, name: str, seed: int) -> Run | str:
    try:
        return series.run(FAULTS[name], seed)
    except Exception:
        return traceback.format_exc()
