"""Runs in a worker process besides the model, be it a Ray actor or a local process.

It outlives nobody: a thread watches the driver (a connection of its own, and the driver's process), and when the
driver is gone the process exits at once, whatever the model is doing. The same thread tells the driver on demand where
a step is. Every step answers with one reply: outputs, or the rank's last word.
"""

from __future__ import annotations

import importlib
import logging
import os
import pickle
import select
import socket
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from app.config.engine import EngineConfig
from app.engine.executor.worker_group.connection import HANG_UP_EVENTS, ConnectionLostError, FrameConnection
from app.engine.executor.worker_group.device_index import own_device_index
from app.engine.executor.worker_group.group import Failure
from app.engine.executor.worker_group.phase import Phase
from app.engine.executor.worker_group.rendezvous import Address, connect
from app.engine.executor.worker_group.semaphores import mapped_semaphores, unlink_semaphores
from app.engine.executor.worker_group.signals import IN_SOCKET, NO_REPLY, PARK, STOP
from app.errors import MantaError
from app.heap import settle_heap
from app.records.step import ModelRunnerOutput, SchedulerOutput, WorkerCall
from app.records.worker_info import RendezvousInfo, WorkerInfo
from app.telemetry.logging import configure_logging

logger = logging.getLogger("manta.executor")


class Worker(Protocol):
    """Does what the actor asks of the worker it holds. `start` and `execute` may run on different threads."""

    def start(self) -> WorkerInfo:
        """Load the model and allocate the KV cache."""

    def execute(self, step_message: SchedulerOutput) -> list[ModelRunnerOutput]:
        """Execute one step."""

    def shutdown(self) -> None:
        """Free what the worker holds."""


@dataclass(frozen=True, slots=True)
class WorkerPlace:
    """Says where a worker stands in its worker group. `answers`: its outputs are the worker group's (rank 0 of the last
    stage)."""

    rank: int
    world_size: int
    local_rank: int
    answers: bool


class WorkerActor:
    """One rank. Ray calls the public methods; `step` is bound into a compiled graph, `run` is the socket's loop."""

    def __init__(self, worker_class: str, config: EngineConfig, place: WorkerPlace, in_ray: bool = True) -> None:
        configure_logging()
        self._in_ray = in_ray
        self._worker_class = worker_class
        self._config = config
        self._place = place
        self._worker: Worker | None = None
        self._connection: FrameConnection | None = None
        self._store: Any = None  # rank 0 keeps it open for the others
        self._phase = Phase()

    def connect(self, address: Address, same_node: bool) -> tuple[int, str]:
        """Connect to the driver and watch it from now on. Returns this process's id and host name."""
        rank, world_size = self._place.rank, self._place.world_size
        self._connection, _ = connect(address, rank, same_node)
        lifeline, driver = connect(address, world_size + rank, same_node)
        watch = threading.Thread(target=_live_with, args=(lifeline, driver, self._phase.describe), name="driver-watch")
        watch.daemon = True
        watch.start()
        return os.getpid(), socket.gethostname()

    def open_store(self, host: str | None) -> tuple[str, int]:
        """Rank 0: open the rendezvous of the ranks on `host`; None: on this node's address in the Ray cluster."""
        from app.distributed.process_groups import RankStore

        if host is None:
            import ray

            host = str(ray.util.get_node_ip_address())
        self._store = RankStore(host, self._place.world_size)
        address: tuple[str, int] = self._store.address
        return address

    def start(self, rendezvous: RendezvousInfo | None) -> WorkerInfo:
        """Build the worker and let it load the model; `rendezvous` where there are several ranks."""
        module, _, attribute = self._worker_class.partition(":")
        build = getattr(importlib.import_module(module), attribute)
        place = self._place
        with self._phase.of("starting"):
            device = own_device_index(place.local_rank) if self._in_ray else place.local_rank
            worker: Worker = build(self._config, place.rank, place.world_size, device, rendezvous)
            info = worker.start()
            settle_heap()
        self._worker = worker
        return info

    def step(self, payload: bytes, capacity_bytes: int) -> bytes:
        """One node of a compiled graph: execute a step message, ring the driver, return the reply.

        The driver sleeps on the socket and reads the graph only after the ring: an empty frame, or the reply itself
        when it exceeds `capacity_bytes`, which the graph's channels hold.
        """
        assert self._connection is not None
        if payload == PARK:
            self._connection.recv()
            return PARK  # not an empty reply: between nodes, Ray's channels never deliver one
        if payload == IN_SOCKET:
            payload = self._connection.recv()
        reply, failed = self._execute(payload)
        if failed:
            self._connection.send(reply)
            return NO_REPLY
        if len(reply) > capacity_bytes:
            self._connection.send(reply)
            return IN_SOCKET
        self._connection.send(b"")
        return reply

    def unlink_semaphores(self) -> None:
        """Remove their names on a node other than the driver's once every rank has answered a compiled graph's step."""
        unlink_semaphores(mapped_semaphores())

    def run(self) -> None:
        """The loop of the socket transport: step messages in, replies out, asleep in between."""
        assert self._connection is not None
        try:
            while (payload := self._connection.recv()) != STOP:
                self._connection.send(self._execute(payload)[0])
        except ConnectionLostError:
            logger.info("worker rank %d: the driver is gone", self._place.rank)

    def serve_calls(self) -> None:
        """The life of a local process: calls of the methods above by name, pickled, one after another; `run` is the
        last."""
        assert self._connection is not None
        while True:
            try:
                method, arguments = pickle.loads(self._connection.recv())
            except ConnectionLostError:
                return
            if method == "run":
                self.run()
                self.shutdown()
                return
            try:
                reply = pickle.dumps(getattr(self, method)(*arguments), protocol=pickle.HIGHEST_PROTOCOL)
            except Exception as error:
                reply = _failure(error).frame()
            self._connection.send(reply)

    def shutdown(self) -> None:
        """Free the model; the driver kills the process afterwards."""
        if self._worker is not None:
            self._worker.shutdown()
            self._worker = None
        self._store = None

    def _execute(self, payload: bytes) -> tuple[bytes, bool]:
        """The reply to a step message, and whether it is the rank's last word."""
        assert self._worker is not None
        try:
            step_message: SchedulerOutput | WorkerCall = pickle.loads(payload)
            if isinstance(step_message, WorkerCall):
                return self._call(step_message), False
            with self._phase.of(f"step {step_message.step_id}"):
                outputs = self._worker.execute(step_message)
        except Exception as error:
            logger.exception("worker rank %d: step failed", self._place.rank)
            return _failure(error).frame(), True
        return pickle.dumps(outputs if self._place.answers else [], protocol=pickle.HIGHEST_PROTOCOL), False

    def _call(self, call: WorkerCall) -> bytes:
        """The pickled result; a Failure if it raises, which ends nothing."""
        try:
            with self._phase.of(call.method):
                result = getattr(self._worker, call.method)(*call.arguments)
            return pickle.dumps(result, protocol=pickle.HIGHEST_PROTOCOL)
        except Exception as error:
            return pickle.dumps(_failure(error), protocol=pickle.HIGHEST_PROTOCOL)


def _failure(error: Exception) -> Failure:
    known = error if isinstance(error, MantaError) else None
    return Failure(f"{type(error).__name__}: {error}", traceback.format_exc(), known)


def _live_with(lifeline: FrameConnection, driver: int | None, describe: Callable[[], str]) -> None:
    """Answer the driver's questions until its end of the connection closes or its process ends; then end this one."""
    poll = select.poll()
    poll.register(lifeline.fileno(), HANG_UP_EVENTS | select.POLLIN)
    if driver is not None:
        poll.register(driver, select.POLLIN)
    try:
        while True:
            ready = dict(poll.poll())
            if driver in ready or ready.get(lifeline.fileno(), 0) & ~select.POLLIN:
                break
            while lifeline.try_recv() is not None:
                lifeline.send(describe().encode())
    except Exception:
        logger.debug("the lifeline broke", exc_info=True)
    os._exit(1)
