"""The code that executors over several processes share: one worker group, stepped over a StepTransport.

All ranks get every step message; the outputs are those of rank 0 of the last pipeline stage. The worker group lives and
dies as a whole: when a worker is gone, hangs or fails a step, the others are killed at once and every call raises
EngineDeadError; and nothing of the worker group outlives the driver (each worker watches it) or `shutdown`.
"""

from __future__ import annotations

import logging
import pickle
import threading
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from app.config.engine import EngineConfig
from app.engine.executor.base import Executor
from app.engine.executor.transports import create_transport
from app.engine.executor.transports.base import StepTransport
from app.engine.executor.worker_group.group import Failure, Rank, RankFailedError, WorkerGroup
from app.errors import EngineDeadError, MantaError
from app.records.state_pool import StatePool
from app.records.step import ModelRunnerOutput, SchedulerOutput, WorkerCall
from app.records.worker_info import RendezvousInfo, WorkerInfo

logger = logging.getLogger("manta.executor")

CONNECT_TIMEOUT_S = 120.0  # a worker process starts in seconds; a loaded machine may take far longer
_WARM_UP_TIMEOUT_S = 60.0  # a graph's first step takes seconds on a fresh actor
_KILL_TIMEOUT_S = 1.0
_DEATH_SETTLE_S = 0.1
WARM_UP_STEP_ID = -1
LOCAL_HOST = "127.0.0.1"


class WorkerGroupExecutor(Executor):
    """Workers [pp][tp] in processes of their own; a subclass says how these come and go."""

    def __init__(self, config: EngineConfig, worker_class: str = "app.worker.worker:Worker") -> None:
        self._config = config
        self._worker_class = worker_class
        self._world_size = config.world_size
        self._output_rank = self._world_size - config.tensor_parallel_size
        self._worker_group: WorkerGroup | None = None
        self._transport: StepTransport | None = None
        self._outstanding = 0
        self._launched = False
        self._death: str | None = None
        self._shutdown_lock = threading.Lock()

    # ---- what subclasses say

    @abstractmethod
    def _launch(self) -> WorkerGroup:
        """Create the worker processes and connect them."""

    @abstractmethod
    def _call_all(self, method: str, arguments: Sequence[tuple[Any, ...]], timeout_s: float | None = None) -> list[Any]:
        """Call a method of the first len(arguments) ranks and wait for all; a worker's MantaError comes through.

        RankFailedError names the rank that did not answer within `timeout_s`.
        """

    @abstractmethod
    def _end_workers(self, healthy: bool) -> None:
        """Ask healthy workers to shut down, then end all; their processes may still be there for a moment."""

    @abstractmethod
    def _release(self) -> None:
        """The workers are gone: give back what they stood on."""

    @abstractmethod
    def _nodes(self) -> Sequence[str]:
        """The node of each rank."""

    def _kill_far(self, worker_group: WorkerGroup) -> None:
        """End ranks of other nodes that do not end by themselves."""

    @abstractmethod
    def _choose_transport(self, device: str) -> tuple[str, str]:
        """Name of the transport and the reason for it."""

    # ---- Executor

    @property
    def worker_pids(self) -> list[int]:
        """Process ids of the workers, by rank."""
        return [rank.pid for rank in self._worker_group.ranks] if self._worker_group else []

    def start(self) -> WorkerInfo:
        """Place, connect and load the workers, and take one empty step through the transport.

        ConfigError and CheckpointError come through unchanged; any other failure is an EngineDeadError.
        """
        assert not self._launched, "started twice"
        self._launched = True
        try:
            return self._start()
        except BaseException as error:
            self._death = self._death or f"the workers could not start: {error}"
            self.shutdown()
            if isinstance(error, MantaError) or not isinstance(error, Exception):
                raise
            raise EngineDeadError(f"the workers could not start: {type(error).__name__}: {error}") from error

    def submit(self, step_message: SchedulerOutput) -> None:
        """Send a step to all ranks; at most `max_inflight_steps` + 1 (a flush) may be outstanding."""
        transport = self._running()
        assert self._outstanding <= self._config.max_inflight_steps, "too many steps in flight"
        with self._fatal_failures():
            transport.submit(pickle.dumps(step_message, protocol=pickle.HIGHEST_PROTOCOL))
        self._outstanding += 1

    def collect(self) -> list[ModelRunnerOutput]:
        """Outputs that the oldest submitted call brought."""
        return self._collect(self._config.step_timeout_s)

    def call(self, method: str, *arguments: Any) -> list[Any]:
        """Send the call to all ranks as if it were a step; afterwards they are parked."""
        transport = self._running()
        assert not self._outstanding, f"{method} called with {self._outstanding} steps outstanding"
        try:
            with self._fatal_failures():
                transport.submit(pickle.dumps(WorkerCall(method, arguments), protocol=pickle.HIGHEST_PROTOCOL))
                results = [pickle.loads(reply) for reply in transport.collect(self._config.start_timeout_s)]
        except KeyboardInterrupt:  # its answer would be taken for a step's
            self._death = f"{method} was interrupted"
            if self._worker_group is not None:
                self._worker_group.kill()
            raise
        self.park()
        failed = [(rank, result) for rank, result in enumerate(results) if isinstance(result, Failure)]
        for rank, failure in failed:
            logger.error("worker rank %d: %s failed:\n%s", rank, method, failure.trace)
        for rank, failure in failed:
            if (error := failure.error) is not None:
                raise type(error)(f"worker rank {rank}: {error.message}", param=error.param)
            raise MantaError(f"{method} on worker rank {rank}: {failure.message}")
        return results

    def park(self) -> None:
        """Let the workers sleep until the next step message; nothing may be outstanding."""
        transport = self._running()
        assert not self._outstanding, f"park with {self._outstanding} steps outstanding"
        with self._fatal_failures():
            transport.park()

    def check_health(self) -> None:
        """Raise EngineDeadError if a worker is gone or gives no sign of life (some microseconds a worker)."""
        self._running()
        worker_group = self._worker_group
        with self._fatal_failures():
            if worker_group is not None:
                worker_group.check()
                worker_group.check_signs_of_life()

    def give_up_step(self, reason: str) -> None:
        """The worker group is ended with what each rank says that it is doing."""
        self._running()
        worker_group = self._worker_group
        with self._fatal_failures():
            if worker_group is not None and not worker_group.is_compiling:
                raise RankFailedError(worker_group.ranks[0], reason, hangs=True)

    def shutdown(self) -> None:
        """End the workers and wait until their processes are gone; idempotent, from any thread, never hangs."""
        with self._shutdown_lock:
            transport, self._transport = self._transport, None
            worker_group, self._worker_group = self._worker_group, None
            healthy = self._death is None and transport is not None
            self._death = self._death or "the executor was shut down"
            if healthy and transport is not None:
                transport.close(healthy=True)
            elif worker_group is not None:
                worker_group.kill()
                self._kill_far(worker_group)
            self._end_workers(healthy)
            if worker_group is not None:
                _end_processes(worker_group)
            if not healthy and transport is not None:
                transport.close(healthy=False)
            self._release()

    # ---- the rest

    def _start(self) -> WorkerInfo:
        self._worker_group = self._launch()
        infos = self._load()
        name, reason = self._choose_transport(infos[0].device)
        inflight = self._config.max_inflight_steps + 1  # and a flush
        transport = create_transport(name, self._worker_group, inflight, self._config.step_timeout_s)
        self._transport = transport
        transport.start()
        self._warm_up()
        notes = list(dict.fromkeys(note for info in infos for note in info.notes))  # ranks mostly say the same
        notes.append(f"step transport: {name} ({reason})")
        blocks = min(info.num_blocks for info in infos)
        return WorkerInfo(
            num_blocks=blocks,
            device=infos[0].device,
            dtype=infos[0].dtype,
            notes=notes,
            kv_connector=tuple(report for info in infos for report in info.kv_connector),
            num_draft_tokens=min(info.num_draft_tokens for info in infos),
            encoder_tokens=infos[0].encoder_tokens,  # the first stage's
            most_rows=min((info.most_rows for info in infos if info.most_rows is not None), default=None),
            num_draft_slots=max(info.num_draft_slots for info in infos),
            num_deferred=min(info.num_deferred for info in infos),
            kv_windows=infos[0].kv_windows,
            states=StatePool.joined([info.states for info in infos if info.states is not None]),
        )

    def _load(self) -> list[WorkerInfo]:
        rendezvous = None
        if self._world_size > 1:
            nodes = tuple(self._nodes())
            host = LOCAL_HOST if len(set(nodes)) == 1 else None
            with self._fatal_failures():
                (address,) = self._call_all("open_store", [(host,)], CONNECT_TIMEOUT_S)
            rendezvous = RendezvousInfo(address, nodes)
        with self._fatal_failures():
            infos: list[WorkerInfo] = self._call_all(
                "start", [(rendezvous,)] * self._world_size, self._config.start_timeout_s
            )
        return infos

    def _warm_up(self) -> None:
        """One empty step: the first one over a fresh transport takes seconds."""
        empty = np.empty(0, np.int32)
        self.submit(SchedulerOutput(WARM_UP_STEP_ID, empty, empty, np.empty(0, np.bool_), flush=True))
        self._collect(max(self._config.step_timeout_s, _WARM_UP_TIMEOUT_S))

    def _collect(self, timeout_s: float) -> list[ModelRunnerOutput]:
        transport = self._running()
        assert self._outstanding, "collect without a submitted step message"
        with self._fatal_failures():
            replies = transport.collect(timeout_s)
        self._outstanding -= 1
        outputs: list[ModelRunnerOutput] = pickle.loads(replies[self._output_rank])
        return outputs

    def _running(self) -> StepTransport:
        if self._death is not None:
            raise EngineDeadError(self._death)
        if self._transport is None:
            raise EngineDeadError("the executor is not running")
        return self._transport

    @contextmanager
    def _fatal_failures(self) -> Iterator[None]:
        """The worker group is lost with any of its ranks: end all others before anybody waits for them."""
        try:
            yield
        except RankFailedError as failure:
            worker_group = self._worker_group
            if self._death is None:
                self._death = self._describe(failure, worker_group)
            if worker_group is not None:
                worker_group.kill()
            raise EngineDeadError(self._death) from failure

    def _describe(self, failure: RankFailedError, worker_group: WorkerGroup | None) -> str:
        """The reason for people: which rank, and if it hangs, what every rank is doing."""
        if failure.failure is not None:
            logger.error("%s:\n%s", failure.rank, failure.failure.trace)
            if worker_group is not None and (lost := _lost_rank(worker_group, failure.rank)) is not None:
                return f"{lost} is gone"  # and the one that waited for it found out first
            return f"worker rank {failure.rank.rank} failed a step: {failure.failure.message}"
        if not failure.hangs or worker_group is None:
            return str(failure)
        phases = worker_group.phases()
        silent = [rank for rank in worker_group.ranks if phases[rank.rank] is None]
        culprit: Rank = silent[0] if silent else failure.rank
        told = "; ".join(
            f"rank {number}: {phase or 'no sign of life (stopped, or stuck outside Python)'}"
            for number, phase in phases.items()
        )
        reason = str(failure).removeprefix(str(failure.rank))
        return f"{culprit}{reason} ({told})"


def _lost_rank(worker_group: WorkerGroup, besides: Rank) -> Rank | None:
    others = (rank for rank in worker_group.ranks if rank is not besides)
    return next((rank for rank in others if rank.connection.hung_up(_DEATH_SETTLE_S)), None)


def _end_processes(worker_group: WorkerGroup) -> None:
    """Wait until the killed workers are gone; a stopped process does not follow Ray, but it does follow SIGKILL."""
    for rank in worker_group.ranks:
        if not rank.connection.hung_up(_KILL_TIMEOUT_S) and rank.same_node:
            rank.kill()
            rank.connection.hung_up(_KILL_TIMEOUT_S)
        rank.close()
