"""Steps over the workers' sockets: a unix socket on the driver's node, TCP across nodes.

Step messages queue in the socket, so several are in flight while the worker executes them one after another; an idle
worker sleeps in `poll`, so there is nothing to park.
"""

from __future__ import annotations

import contextlib
from typing import Any

from app.engine.executor.transports.base import StepTransport
from app.engine.executor.worker_group.group import RankFailedError
from app.engine.executor.worker_group.signals import CALL_RUN, STOP

_STOP_TIMEOUT_S = 1.0


class SocketTransport(StepTransport):
    """Length-prefixed frames to the workers' `run` loops."""

    _loops: list[Any]

    def start(self) -> None:
        """Send the workers into their loops, which last until `close`."""
        self._loops = [rank.actor.run.remote() for rank in self._worker_group.ranks if rank.actor is not None]
        for rank in self._worker_group.ranks:
            if rank.actor is None:
                self._worker_group.send(rank, CALL_RUN, self._step_timeout_s)

    def submit(self, payload: bytes) -> None:
        """Queue one step message in every rank's socket."""
        self._worker_group.broadcast(payload, self._step_timeout_s)

    def collect(self, timeout_s: float) -> list[bytes]:
        """Wait for every rank's reply to the oldest step message."""
        return self._worker_group.gather(timeout_s)

    def park(self) -> None:
        """Nothing spins."""

    def close(self, healthy: bool) -> None:
        """Let the workers leave their loops, so that they can take other calls."""
        if healthy:
            with contextlib.suppress(RankFailedError):
                self._worker_group.broadcast(STOP, _STOP_TIMEOUT_S)
