"""The actor around a Worker: what runs in a worker process besides the model.

It outlives nobody: a thread watches the driver (socket and process), and when the driver is gone the process exits
at once, whatever the model is doing. Every step answers with one reply, be it outputs or the text of an exception.
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
from dataclasses import dataclass
from typing import Protocol

from app.config import EngineConfig
from app.engine.executor.transports.connection import HANG_UP_EVENTS, ConnectionLostError, FrameConnection
from app.engine.executor.transports.rendezvous import Address, connect
from app.engine.step import ModelRunnerOutput, SchedulerOutput
from app.engine.worker_info import WorkerInfo
from app.telemetry.logging import configure_logging

logger = logging.getLogger("manta.executor")

PARK = b"\x00"  # instead of a pickled letter: wait on the socket until a frame comes
IN_SOCKET = b"\x01"  # instead of a payload too large for a channel: it is the next frame of the socket
STOP = b"\x02"  # on the socket: leave the loop


class Worker(Protocol):
    """What the actor asks of the worker it holds. `start` and `execute` may run on different threads."""

    def start(self) -> WorkerInfo:
        """Load the model and allocate the KV cache."""

    def execute(self, letter: SchedulerOutput) -> list[ModelRunnerOutput]:
        """Execute one step."""

    def shutdown(self) -> None:
        """Free what the worker holds."""


@dataclass(frozen=True, slots=True)
class Reply:
    """Answer to one letter: `outputs`, or the worker's `error` (type and message) with its `trace`."""

    outputs: list[ModelRunnerOutput]
    error: str | None = None
    trace: str = ""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a worker stands in its gang. `answers`: its outputs are the gang's (rank 0 of the last stage)."""

    rank: int
    world_size: int
    local_rank: int
    answers: bool


class WorkerActor:
    """One rank. Ray calls the public methods; `step` is bound into a compiled graph, `run` is the socket's loop."""

    def __init__(self, worker_class: str, config: EngineConfig, place: Place) -> None:
        configure_logging()
        self._worker_class = worker_class
        self._config = config
        self._place = place
        self._worker: Worker | None = None
        self._connection: FrameConnection | None = None

    def connect(self, address: Address, same_node: bool) -> tuple[int, str]:
        """Connect to the driver and watch it from now on. Returns this process's id and host name."""
        self._connection, driver = connect(address, self._place.rank, same_node)
        watch = threading.Thread(target=_exit_with, args=(self._connection.fileno(), driver), name="driver-watch")
        watch.daemon = True
        watch.start()
        return os.getpid(), socket.gethostname()

    def start(self) -> WorkerInfo:
        """Build the worker and let it load the model."""
        module, _, attribute = self._worker_class.partition(":")
        build = getattr(importlib.import_module(module), attribute)
        place = self._place
        worker: Worker = build(self._config, place.rank, place.world_size, place.local_rank)
        info = worker.start()
        self._worker = worker
        return info

    def step(self, payload: bytes, capacity_bytes: int) -> bytes:
        """One node of a compiled graph: execute a letter, ring the driver, return the reply.

        The driver sleeps on the socket and reads the graph only after the ring: an empty frame, or the reply itself
        when it exceeds `capacity_bytes`, which the graph's channels hold.
        """
        assert self._connection is not None
        if payload == PARK:
            self._connection.recv()
            return PARK  # not an empty reply: between nodes, Ray's channels never deliver one
        if payload == IN_SOCKET:
            payload = self._connection.recv()
        reply = self._execute(payload)
        if len(reply) > capacity_bytes:
            self._connection.send(reply)
            return IN_SOCKET
        self._connection.send(b"")
        return reply

    def run(self) -> None:
        """The loop of the socket transport: letters in, replies out, asleep in between."""
        assert self._connection is not None
        try:
            while (payload := self._connection.recv()) != STOP:
                self._connection.send(self._execute(payload))
        except ConnectionLostError:
            logger.info("worker rank %d: the driver is gone", self._place.rank)

    def shutdown(self) -> None:
        """Free the model; the driver kills the process afterwards."""
        if self._worker is not None:
            self._worker.shutdown()
            self._worker = None

    def _execute(self, payload: bytes) -> bytes:
        assert self._worker is not None
        try:
            reply = Reply(self._worker.execute(pickle.loads(payload)))
        except Exception as error:
            logger.exception("worker rank %d: step failed", self._place.rank)
            reply = Reply([], f"{type(error).__name__}: {error}", traceback.format_exc())
        if not self._place.answers:
            reply = Reply([], reply.error, reply.trace)
        return pickle.dumps(reply, protocol=pickle.HIGHEST_PROTOCOL)


def _exit_with(connection: int, driver: int | None) -> None:
    """Sleep until the driver's end of the connection closes or its process ends; then end this process."""
    poll = select.poll()
    poll.register(connection, HANG_UP_EVENTS)
    if driver is not None:
        poll.register(driver, select.POLLIN)
    poll.poll()
    os._exit(1)
