"""Carries steps between the driver and its workers.

Payloads are opaque bytes here: a pickled step message down, a pickled reply of every rank up, in order. What a
transport promises: `submit` returns before the step is computed, up to `max_inflight` steps wait at the workers,
nothing spins while parked, and a worker that is gone or hangs is a RankFailedError that names it, never an endless
wait.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from app.engine.executor.worker_group.group import WorkerGroup


class StepTransport(ABC):
    """One way to reach the workers of a worker group. One thread at a time drives it."""

    needs_actors: ClassVar[bool] = False  # whether the workers must be Ray's actors

    def __init__(self, worker_group: WorkerGroup, max_inflight: int, step_timeout_s: float) -> None:
        self._worker_group = worker_group
        self._max_inflight = max_inflight
        self._step_timeout_s = step_timeout_s

    @abstractmethod
    def start(self) -> None:
        """Make the workers, which are loaded and connected by now, ready to take steps."""

    @abstractmethod
    def submit(self, payload: bytes) -> None:
        """Send one step to every rank, waking parked workers first."""

    @abstractmethod
    def collect(self, timeout_s: float) -> list[bytes]:
        """Wait for the oldest step submitted; one reply a rank, in the order of ranks."""

    @abstractmethod
    def park(self) -> None:
        """No step is outstanding and none will come for a while: wait without using the CPU."""

    @abstractmethod
    def close(self, healthy: bool) -> None:
        """Stop taking steps. `healthy` False: the workers are dead or hang, so ask nothing of them. Never hangs."""
