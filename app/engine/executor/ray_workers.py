"""The executor over Ray: one group of worker actors in a placement group.

What a worker group is, and how it is stepped: worker_group_executor.py. Here: bundles, actors, devices, and the end of
all of them.
"""

from __future__ import annotations

import logging
import os
import secrets
import signal
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from app.config.engine import EngineConfig
from app.engine.executor import own_ray
from app.engine.executor.placement import Placement, place
from app.engine.executor.transports import choose_transport
from app.engine.executor.transports.compiled_graph import worker_environment
from app.engine.executor.worker_group.connection import FrameConnection
from app.engine.executor.worker_group.device_index import KEEPS_ALL_VISIBLE
from app.engine.executor.worker_group.group import Rank, RankFailedError, WorkerGroup, open_pidfd
from app.engine.executor.worker_group.rendezvous import Rendezvous
from app.engine.executor.worker_group.worker_actor import WorkerActor, WorkerPlace
from app.engine.executor.worker_group_executor import CONNECT_TIMEOUT_S, WorkerGroupExecutor
from app.errors import EngineDeadError, MantaError
from app.plugins import ALLOWED_VARIABLE

logger = logging.getLogger("manta.executor")

_SHUTDOWN_TIMEOUT_S = 5.0
HAS_TORCH = {
    "MANTA_WORKER_KIND": "device"
}  # for a cluster of `manta serve`, whose workers begin with their imports done


class RayWorkersExecutor(WorkerGroupExecutor):
    """Worker actors [pp][tp], one per GPU (or one on the CPU)."""

    def __init__(self, config: EngineConfig, worker_class: str = "app.worker.worker:Worker") -> None:
        super().__init__(config, worker_class)
        self._placement: Placement | None = None
        self._actors: list[Any] = []

    def _launch(self) -> WorkerGroup:
        if not ray.is_initialized():
            own_ray.start()
        self._placement = place(self._config)
        self._create_actors(self._placement)
        worker_group = self._connect(self._placement)
        own_ray.warn_of_niceness(rank.pid for rank in worker_group.ranks if rank.same_node)
        return worker_group

    def _create_actors(self, placement: Placement) -> None:
        actor_class = ray.remote(WorkerActor)
        worker_group = f"{_owner()}#{secrets.token_hex(4)}"
        for rank in range(self._world_size):
            options = placement.options(rank, self._config.device)
            actor = actor_class.options(
                **options,
                name=f"{worker_group}#rank{rank}",
                max_restarts=0,
                max_task_retries=0,
                runtime_env={"env_vars": self._environment(gpus=options["num_gpus"])},
            ).remote(
                self._worker_class,
                self._config,
                WorkerPlace(rank, self._world_size, placement.local_rank(rank), rank == self._output_rank),
            )
            self._actors.append(actor)

    def _environment(self, gpus: float) -> dict[str, str]:
        """Environment of a worker process. Ray would set the threads to the bundle's CPUs."""
        threads = self._config.num_threads or (1 if gpus else max(1, _usable_cores() // self._world_size))
        environment = {**worker_environment(self._config.step_timeout_s), **HAS_TORCH, "OMP_NUM_THREADS": str(threads)}
        if gpus and self._world_size > 1:
            # Every worker sees all GPUs of its node, because ranks map each other's memory; each uses its own.
            environment[KEEPS_ALL_VISIBLE] = "1"
        if (allowed := os.environ.get(ALLOWED_VARIABLE)) is not None:
            environment[ALLOWED_VARIABLE] = allowed
        return environment

    def _connect(self, placement: Placement) -> WorkerGroup:
        """Let every worker connect back to this process, and watch it from then on."""
        here = ray.get_runtime_context().get_node_id()
        same_node = [node == here for node in placement.node_of]
        count = self._world_size
        with Rendezvous(None if all(same_node) else ray.util.get_node_ip_address()) as rendezvous:
            arguments = [(rendezvous.address, same) for same in same_node]
            processes, connections = self._meet(rendezvous, arguments)
        ranks = [
            Rank(
                *(rank, self._actors[rank], connections[rank], pid, host, same_node[rank], connections[count + rank]),
                open_pidfd(pid) if same_node[rank] else None,
            )
            for rank, (pid, host) in enumerate(processes)
        ]
        return WorkerGroup(ranks)

    def _meet(
        self, rendezvous: Rendezvous, arguments: Sequence[tuple[Any, ...]]
    ) -> tuple[list[Any], list[FrameConnection]]:
        """Returns what `connect` does of every worker, and the connections; the two ends wait for each other's
        proofs."""
        failed = threading.Event()

        def check() -> None:
            if failed.is_set():
                raise EngineDeadError("a worker could not connect")

        with ThreadPoolExecutor(1, "rendezvous") as thread:
            accepted = thread.submit(rendezvous.accept, self._world_size, CONNECT_TIMEOUT_S, 2, check)
            try:
                return self._call_all("connect", arguments, CONNECT_TIMEOUT_S), accepted.result()
            except BaseException:
                failed.set()
                raise

    def _call_all(self, method: str, arguments: Sequence[tuple[Any, ...]], timeout_s: float | None = None) -> list[Any]:
        actors = self._actors[: len(arguments)]
        calls = [getattr(actor, method).remote(*args) for actor, args in zip(actors, arguments, strict=True)]
        try:
            results: list[Any] = ray.get(calls, timeout=timeout_s)
        except RayTaskError as error:
            if isinstance(error.cause, MantaError):
                raise error.cause from None
            raise EngineDeadError(f"a worker failed to {method}: {error}") from error
        except GetTimeoutError as error:
            if self._worker_group is None:
                raise EngineDeadError(f"the workers did not {method} within {timeout_s:g} s") from error
            done, _ = ray.wait(calls, num_returns=len(calls), timeout=0)
            ranks = self._worker_group.ranks
            late = [rank for rank, call in zip(ranks, calls, strict=False) if call not in done] or ranks
            raise RankFailedError(late[0], f"did not {method} within {timeout_s:g} s: it hangs", hangs=True) from error
        except RayError as error:
            raise EngineDeadError(f"a worker was lost before it could {method}: {error}") from error
        return results

    def _end_workers(self, healthy: bool) -> None:
        actors, self._actors = self._actors, []
        if not ray.is_initialized():
            return  # Ray took its actors with it
        if healthy:
            calls = [actor.shutdown.remote() for actor in actors]
            ray.wait(calls, num_returns=len(calls), timeout=_SHUTDOWN_TIMEOUT_S)
        for actor in actors:
            ray.kill(actor, no_restart=True)

    def _release(self) -> None:
        placement, self._placement = self._placement, None
        if placement is not None and ray.is_initialized():
            placement.release()

    def _nodes(self) -> Sequence[str]:
        assert self._placement is not None
        return self._placement.node_of

    def _choose_transport(self, device: str) -> tuple[str, str]:
        assert self._worker_group is not None
        on_this_node = all(rank.same_node for rank in self._worker_group.ranks)
        return choose_transport(self._config.step_transport, device, on_this_node)

    def _kill_far(self, worker_group: WorkerGroup) -> None:
        """A stopped rank of another node takes no word from Ray: have SIGKILL sent there."""
        placement = self._placement
        if placement is None or not ray.is_initialized():
            return
        for rank in worker_group.ranks:
            if not rank.same_node and not rank.connection.hung_up():
                node = NodeAffinitySchedulingStrategy(placement.node_of[rank.rank], soft=False)
                _send_signal.options(scheduling_strategy=node).remote(rank.pid, signal.SIGKILL)


@ray.remote(num_cpus=0, max_retries=0)  # type: ignore[untyped-decorator]
def _send_signal(pid: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def _owner() -> str:
    """Names whose workers these are, as Ray's dashboard shows it: application, model and replica by Serve's name
    for it."""
    name: str = ray.get_runtime_context().get_actor_name() or "manta"
    return name.rpartition("::")[2]


def _usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
