"""Says what the engine asks of the workers, wherever they run."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from app.errors import EngineDeadError
from app.records.step import ModelRunnerOutput, SchedulerOutput
from app.records.worker_info import WorkerInfo

__all__ = ["Executor", "WorkerInfo"]


class Executor(ABC):
    """One worker group. One thread drives it; `submit` and `collect` keep the order of the step messages.

    A worker executes its calls one after another. A call on a device that computes in the background may come back
    without its own step's output and with the previous one's (I2); so `collect` returns zero or more outputs, and a
    message with `flush` brings back all that is outstanding.

    Every method but `shutdown` raises EngineDeadError once a worker is gone or a step exceeded its time limit; there
    is no way back from that: the replica exits and is replaced as a whole.
    """

    @abstractmethod
    def start(self) -> WorkerInfo:
        """Start the workers, load the model, size and allocate the KV cache, warm the first step."""

    @abstractmethod
    def submit(self, step_message: SchedulerOutput) -> None:
        """Send a step; returns before it is computed wherever the transport allows."""

    @abstractmethod
    def collect(self) -> list[ModelRunnerOutput]:
        """Wait for the oldest submitted call; outputs come in the order of their steps."""

    @abstractmethod
    def call(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method of every worker while no step is out; its results, by rank. Workers in processes of their own
        may take `start_timeout_s` for it.

        What one raises is raised here, a MantaError as its kind and anything else as one, with the rank where there are
        several, and the workers go on.
        """

    @abstractmethod
    def park(self) -> None:
        """Nothing will run for a while: make the workers wait without spinning. `submit` wakes them."""

    @abstractmethod
    def check_health(self) -> None:
        """Raise EngineDeadError if a worker is gone or gives no sign of life; cheap, from any thread, once a second."""

    def give_up_step(self, reason: str) -> None:
        """A step takes longer than a step may: end the workers and raise EngineDeadError, unless a kernel is being
        compiled. From any thread."""
        raise EngineDeadError(reason)

    @abstractmethod
    def shutdown(self) -> None:
        """Stop the workers and free what they hold; idempotent."""
