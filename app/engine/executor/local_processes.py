"""The executor without Ray for several ranks: child processes of this one, stepped over the socket transport.

The same workers as Ray's, started as `python -m app.engine.executor.local_worker`, so a script that uses them needs no
`if __name__ == "__main__"`. They end with this process however it ends, because each watches it; and one that cannot
watch, as it is stopped, is killed by the kernel (Linux).
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from app.backends import STEP_TRANSPORTS
from app.config.engine import EngineConfig
from app.engine.executor.spawner import spawn
from app.engine.executor.transports import SET
from app.engine.executor.worker_group.group import Rank, RankFailedError, WorkerGroup, open_pidfd
from app.engine.executor.worker_group.rendezvous import Rendezvous
from app.engine.executor.worker_group.worker_actor import WorkerPlace
from app.engine.executor.worker_group_executor import CONNECT_TIMEOUT_S, LOCAL_HOST, WorkerGroupExecutor
from app.errors import ConfigError, EngineDeadError, MantaError

_SHUTDOWN_TIMEOUT_S = 5.0
_POLL_S = 0.02
_ROOT = Path(__file__).resolve().parents[3]


class LocalProcessesExecutor(WorkerGroupExecutor):
    """Worker processes [pp][tp] on this machine: one per GPU, or all on the CPU."""

    def __init__(self, config: EngineConfig, worker_class: str = "app.worker.worker:Worker") -> None:
        super().__init__(config, worker_class)
        self._processes: list[subprocess.Popen[bytes]] = []

    def _launch(self) -> WorkerGroup:
        name = self._config.step_transport
        if name != "auto" and STEP_TRANSPORTS.load(name).needs_actors:
            raise ConfigError(f"step_transport={name} needs executor=ray_workers", param="step_transport")
        count = self._world_size
        with Rendezvous(None) as rendezvous:
            for rank in range(count):
                place = WorkerPlace(rank, count, rank, rank == self._output_rank)
                arguments = (rendezvous.address, self._worker_class, self._config, place)
                self._processes.append(spawn(partial(self._spawn, arguments)))
            connections = rendezvous.accept(count, CONNECT_TIMEOUT_S, per_rank=2, check=self._check_processes)
        host = os.uname().nodename
        return WorkerGroup(
            [
                Rank(rank, None, connections[rank], process.pid, host, True, connections[count + rank], pidfd)
                for rank, process in enumerate(self._processes)
                for pidfd in (open_pidfd(process.pid),)
            ]
        )

    def _spawn(self, arguments: tuple[Any, ...]) -> subprocess.Popen[bytes]:
        path = os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH")]))
        environment = {**os.environ, "PYTHONPATH": path}
        if self._config.num_threads is not None:
            environment["OMP_NUM_THREADS"] = str(self._config.num_threads)
        command = [sys.executable, "-m", "app.engine.executor.local_worker"]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, env=environment)
        assert process.stdin is not None
        with process.stdin as stdin, suppress(BrokenPipeError):
            stdin.write(pickle.dumps(arguments))
        return process

    def _check_processes(self) -> None:
        """Raise EngineDeadError if a worker has ended during the start: it will never connect."""
        for rank, process in enumerate(self._processes):
            if process.poll() is not None:
                raise EngineDeadError(
                    f"worker rank {rank} ended with code {process.returncode} before it could connect"
                )

    def _call_all(self, method: str, arguments: Sequence[tuple[Any, ...]], timeout_s: float | None = None) -> list[Any]:
        assert self._worker_group is not None
        part = WorkerGroup(self._worker_group.ranks[: len(arguments)])
        try:
            for rank, args in zip(part.ranks, arguments, strict=True):
                part.send(rank, pickle.dumps((method, args)), CONNECT_TIMEOUT_S)
            return [pickle.loads(frame) for frame in part.gather(timeout_s)]
        except RankFailedError as failed:
            if failed.hangs:
                raise
            if failed.failure is not None and isinstance(failed.failure.error, MantaError):
                raise failed.failure.error from None
            trace = f"\n{failed.failure.trace}" if failed.failure is not None else ""
            raise EngineDeadError(f"a worker was lost before it could {method}: {failed}{trace}") from failed

    def _end_workers(self, healthy: bool) -> None:
        deadline = time.monotonic() + (_SHUTDOWN_TIMEOUT_S if healthy else 0.0)
        while healthy and time.monotonic() < deadline and any(process.poll() is None for process in self._processes):
            time.sleep(_POLL_S)
        for process in self._processes:
            process.kill()
            process.wait()

    def _release(self) -> None:
        self._processes.clear()

    def _nodes(self) -> Sequence[str]:
        return [LOCAL_HOST] * self._world_size

    def _choose_transport(self, device: str) -> tuple[str, str]:
        name = self._config.step_transport
        return ("socket", "local processes") if name == "auto" else (name, SET)
