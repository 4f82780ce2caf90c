"""The executor over Ray: one gang of worker actors in a placement group, stepped over a StepTransport.

All ranks get every letter; the outputs are those of rank 0 of the last pipeline stage. The gang lives and dies as a
whole: when a worker is gone, hangs or fails a step, every call raises EngineDeadError, and nothing of the gang outlives
the driver (each worker watches it) or `shutdown`.
"""

from __future__ import annotations

import logging
import os
import pickle
import secrets
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import ray
from ray.exceptions import RayError, RayTaskError

from app.config import EngineConfig
from app.engine.executor.base import Executor
from app.engine.executor.placement import Placement, place
from app.engine.executor.transports import TRANSPORTS, choose_transport
from app.engine.executor.transports.base import StepTransport
from app.engine.executor.transports.compiled_graph import worker_environment
from app.engine.executor.transports.gang import Gang, Rank, RankFailedError
from app.engine.executor.transports.rendezvous import Rendezvous
from app.engine.executor.worker_actor import Place, Reply, WorkerActor
from app.engine.step import ModelRunnerOutput, SchedulerOutput
from app.engine.worker_info import WorkerInfo
from app.errors import EngineDeadError, MantaError

logger = logging.getLogger("manta.executor")

_CONNECT_TIMEOUT_S = 120.0  # a worker process starts in seconds; a loaded machine may take far longer
_WARM_UP_TIMEOUT_S = 60.0  # a graph's first step takes seconds on a fresh actor
_SHUTDOWN_TIMEOUT_S = 5.0
_KILL_TIMEOUT_S = 1.0
WARM_UP_STEP_ID = -1


class RayWorkersExecutor(Executor):
    """Worker actors [pp][tp], one per GPU (or one on the CPU)."""

    def __init__(self, config: EngineConfig, worker_class: str = "app.engine.worker.worker:Worker") -> None:
        self._config = config
        self._worker_class = worker_class
        self._world_size = config.tensor_parallel_size * config.pipeline_parallel_size
        self._output_rank = self._world_size - config.tensor_parallel_size
        self._placement: Placement | None = None
        self._actors: list[Any] = []
        self._gang: Gang | None = None
        self._transport: StepTransport | None = None
        self._outstanding = 0
        self._death: str | None = None
        self._shutdown_lock = threading.Lock()

    @property
    def worker_pids(self) -> list[int]:
        """Process ids of the workers, by rank."""
        return [rank.pid for rank in self._gang.ranks] if self._gang else []

    def start(self) -> WorkerInfo:
        """Place, connect and load the workers, and take one empty step through the transport.

        ConfigError and CheckpointError come through unchanged; any other failure is an EngineDeadError.
        """
        assert self._placement is None, "started twice"
        try:
            return self._start()
        except BaseException as error:
            self.shutdown()
            if isinstance(error, MantaError) or not isinstance(error, Exception):
                raise
            raise EngineDeadError(f"the workers could not start: {type(error).__name__}: {error}") from error

    def submit(self, letter: SchedulerOutput) -> None:
        """Send a step to all ranks; at most `max_inflight_steps` + 1 (a flush) may be outstanding."""
        transport = self._running()
        assert self._outstanding <= self._config.max_inflight_steps, "too many steps in flight"
        with self._fatal_failures():
            transport.submit(pickle.dumps(letter, protocol=pickle.HIGHEST_PROTOCOL))
        self._outstanding += 1

    def collect(self) -> list[ModelRunnerOutput]:
        """Outputs that the oldest submitted call brought."""
        return self._collect(self._config.step_timeout_s)

    def _collect(self, timeout_s: float) -> list[ModelRunnerOutput]:
        transport = self._running()
        assert self._outstanding, "collect without a submitted letter"
        with self._fatal_failures():
            replies: list[Reply] = [pickle.loads(reply) for reply in transport.collect(timeout_s)]
        self._outstanding -= 1
        for rank, reply in enumerate(replies):
            if reply.error is not None:
                logger.error("worker rank %d:\n%s", rank, reply.trace)
                raise self._dead(f"worker rank {rank} failed a step: {reply.error}")
        return replies[self._output_rank].outputs

    def park(self) -> None:
        """Let the workers sleep until the next letter; nothing may be outstanding."""
        transport = self._running()
        assert not self._outstanding, f"park with {self._outstanding} steps outstanding"
        with self._fatal_failures():
            transport.park()

    def check_health(self) -> None:
        """Raise EngineDeadError if a worker is gone (a few microseconds a worker, from any thread)."""
        self._running()
        gang = self._gang
        with self._fatal_failures():
            if gang is not None:
                gang.check()

    def shutdown(self) -> None:
        """End the workers and wait until their processes are gone; idempotent, from any thread, never hangs."""
        with self._shutdown_lock:
            transport, self._transport = self._transport, None
            gang, self._gang = self._gang, None
            actors, self._actors = self._actors, []
            placement, self._placement = self._placement, None
            healthy = self._death is None and transport is not None
            self._death = self._death or "the executor was shut down"
            if not ray.is_initialized():
                return  # Ray took its actors and placement groups with it
            if healthy and transport is not None:
                transport.close(healthy=True)
                calls = [actor.shutdown.remote() for actor in actors]
                ray.wait(calls, num_returns=len(calls), timeout=_SHUTDOWN_TIMEOUT_S)
            for actor in actors:
                ray.kill(actor, no_restart=True)
            if gang is not None:
                _end_processes(gang)
            if not healthy and transport is not None:
                transport.close(healthy=False)
            if placement is not None:
                placement.release()

    def _start(self) -> WorkerInfo:
        if not ray.is_initialized():
            ray.init(include_dashboard=False)
        self._placement = place(self._config)
        self._create_actors(self._placement)
        self._gang = self._connect(self._placement)
        infos: list[WorkerInfo] = self._call_all("start", [()] * self._world_size)
        name, reason = choose_transport(self._config.step_transport, infos[0].device)
        inflight = self._config.max_inflight_steps + 1  # and a flush
        transport = TRANSPORTS.load(name)(self._gang, inflight, self._config.step_timeout_s)
        self._transport = transport
        transport.start()
        self._warm_up()
        notes = list(dict.fromkeys(note for info in infos for note in info.notes))  # ranks mostly say the same
        notes.append(f"step transport: {name} ({reason})")
        blocks = min(info.num_blocks for info in infos)
        return WorkerInfo(num_blocks=blocks, device=infos[0].device, dtype=infos[0].dtype, notes=notes)

    def _warm_up(self) -> None:
        """One empty step: the first one over a fresh transport takes seconds."""
        empty = np.empty(0, np.int32)
        self.submit(SchedulerOutput(WARM_UP_STEP_ID, empty, empty, np.empty(0, np.bool_), flush=True))
        self._collect(max(self._config.step_timeout_s, _WARM_UP_TIMEOUT_S))

    def _create_actors(self, placement: Placement) -> None:
        actor_class = ray.remote(WorkerActor)
        gang = secrets.token_hex(4)
        for rank in range(self._world_size):
            options = placement.options(rank, self._config.device)
            actor = actor_class.options(
                **options,
                name=f"manta-worker-{gang}-{rank}",
                max_restarts=0,
                max_task_retries=0,
                runtime_env={"env_vars": self._environment(gpus=options["num_gpus"])},
            ).remote(
                self._worker_class,
                self._config,
                Place(rank, self._world_size, placement.local_rank(rank), rank == self._output_rank),
            )
            self._actors.append(actor)

    def _environment(self, gpus: float) -> dict[str, str]:
        """Environment of a worker process. Ray would set the threads to the bundle's CPUs."""
        threads = self._config.num_threads or (1 if gpus else _usable_cores())
        return {**worker_environment(self._config.step_timeout_s), "OMP_NUM_THREADS": str(threads)}

    def _connect(self, placement: Placement) -> Gang:
        """Let every worker connect back to this process, and watch it from then on."""
        here = ray.get_runtime_context().get_node_id()
        same_node = [node == here for node in placement.node_of]
        with Rendezvous(None if all(same_node) else ray.util.get_node_ip_address()) as rendezvous:
            arguments = [(rendezvous.address, same) for same in same_node]
            processes = self._call_all("connect", arguments, _CONNECT_TIMEOUT_S)
            connections = rendezvous.accept(self._world_size, _CONNECT_TIMEOUT_S)
        return Gang(
            [
                Rank(rank, self._actors[rank], connections[rank], pid, host, same_node[rank])
                for rank, (pid, host) in enumerate(processes)
            ]
        )

    def _call_all(self, method: str, arguments: Sequence[tuple[Any, ...]], timeout_s: float | None = None) -> list[Any]:
        """Call an actor method of every rank and wait for all; a worker's MantaError comes through as it is."""
        calls = [getattr(actor, method).remote(*args) for actor, args in zip(self._actors, arguments, strict=True)]
        try:
            results: list[Any] = ray.get(calls, timeout=timeout_s)
        except RayTaskError as error:
            if isinstance(error.cause, MantaError):
                raise error.cause from None
            raise EngineDeadError(f"a worker failed to {method}: {error}") from error
        except RayError as error:
            raise EngineDeadError(f"a worker was lost before it could {method}: {error}") from error
        return results

    def _running(self) -> StepTransport:
        if self._death is not None:
            raise EngineDeadError(self._death)
        if self._transport is None:
            raise EngineDeadError("the executor is not running")
        return self._transport

    def _dead(self, reason: str) -> EngineDeadError:
        self._death = self._death or reason
        return EngineDeadError(self._death)

    @contextmanager
    def _fatal_failures(self) -> Iterator[None]:
        try:
            yield
        except RankFailedError as failure:
            raise self._dead(str(failure)) from failure


def _usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def _end_processes(gang: Gang) -> None:
    """Wait until the killed workers are gone; a stopped process does not follow Ray, but it does follow SIGKILL."""
    for rank in gang.ranks:
        if not rank.connection.hung_up(_KILL_TIMEOUT_S) and rank.same_node:
            with suppress(ProcessLookupError):
                os.kill(rank.pid, signal.SIGKILL)
            rank.connection.hung_up(_KILL_TIMEOUT_S)
        rank.connection.close()
