"""Which run comes next: those of one deployment's shape stay together, and the longest begin first."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from loadtest.faults.fault import Fault
from loadtest.faults.results import Run
from loadtest.faults.shapes import Shape

_SHORT_S, _LONG_S = 30.0, 120.0  # about what a run takes


@dataclass(frozen=True, slots=True)
class Task:
    """One run to make."""

    fault: Fault
    seed: int

    @property
    def about_s(self) -> float:
        """Seconds that it takes, roughly."""
        return _LONG_S if self.fault.is_long else _SHORT_S


class Plan:
    """The runs still to make, so that `runs` and they hold `num_runs` of each fault; `take` gives them out."""

    def __init__(self, faults: Sequence[Fault], runs: Iterable[Run], num_runs: int) -> None:
        self._left: dict[str, list[Task]] = {}
        self._num_at: dict[str, int] = {}  # jobs that have a deployment of the shape
        done: dict[str, list[int]] = {}
        for run in runs:
            done.setdefault(run.fault, []).append(run.seed)
        for fault in faults:
            tasks = [Task(fault, seed) for seed in _new_seeds(done.get(fault.name, []), num_runs)]
            self._left.setdefault(fault.shape.name, []).extend(tasks)
        for tasks in self._left.values():
            tasks.sort(key=lambda task: (task.about_s, -task.seed))

    def __len__(self) -> int:
        return sum(map(len, self._left.values()))

    def take(self, shape: Shape | None) -> Task | None:
        """The next run of a job whose deployment is of `shape`; None when none is left."""
        name = shape.name if shape is not None else ""
        if not self._left.get(name):
            waiting = {other: tasks for other, tasks in self._left.items() if tasks}
            if not waiting:
                return None
            self._num_at[name] = self._num_at.get(name, 1) - 1
            name = max(waiting, key=lambda other: self._share_s(other))
            self._num_at[name] = self._num_at.get(name, 0) + 1
        return self._left[name].pop()

    def _share_s(self, name: str) -> float:
        """What is left for one further job of this shape."""
        return sum(task.about_s for task in self._left[name]) / (self._num_at.get(name, 0) + 1)


def _new_seeds(done: list[int], num_runs: int) -> list[int]:
    """Seeds that no run had, as many as runs are missing."""
    fresh = [seed for seed in range(num_runs + len(done)) if seed not in done]
    return fresh[: max(0, num_runs - len(done))]
