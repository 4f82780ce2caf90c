"""The workers of one executor, as the driver sees them: ranks in order, each with its process and its connections.

Each rank has two: `steps` carries step messages and replies, `lifeline` is served by a thread of its own in the worker,
so that it answers also while a step hangs, and says where. A frame that starts with FAILED is a rank's last word.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import signal
import sys
import time
from dataclasses import dataclass
from typing import Any

from app.engine.executor.worker_group.connection import HANG_UP_EVENTS, ConnectionLostError, FrameConnection
from app.engine.executor.worker_group.phase import COMPILING
from app.engine.executor.worker_group.signs_of_life import SignsOfLife
from app.errors import MantaError

FAILED = b"\x03"  # then a pickled Failure; pickles themselves start with another byte


@dataclass(frozen=True, slots=True)
class Failure:
    """Says what went wrong in a rank: a line for people, the trace for the log, and the error if it is a user's."""

    message: str
    trace: str
    error: MantaError | None = None

    def frame(self) -> bytes:
        """The rank's last frame."""
        return FAILED + pickle.dumps(self, protocol=pickle.HIGHEST_PROTOCOL)


@dataclass(frozen=True, slots=True)
class Rank:
    """One worker: its Ray actor handle (None: a local process), its connections, and where it runs."""

    rank: int
    actor: Any
    connection: FrameConnection
    pid: int
    host: str
    same_node: bool  # as the driver
    lifeline: FrameConnection | None = None
    pidfd: int | None = None  # on the driver's node, where there is such a thing: a pid may be given away again

    def __str__(self) -> str:
        return f"worker rank {self.rank} (pid {self.pid} on {self.host})"

    def kill(self) -> None:
        """End the process at once, stopped or not, if it runs on this node."""
        if not self.same_node or self.connection.hung_up():
            return
        with contextlib.suppress(OSError):
            if self.pidfd is not None:
                signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
            else:
                os.kill(self.pid, signal.SIGKILL)

    def close(self) -> None:
        """Close this end of the connections; the worker, if it still runs, ends itself."""
        self.connection.close()
        if self.lifeline is not None:
            self.lifeline.close()
        if self.pidfd is not None:
            with contextlib.suppress(OSError):
                os.close(self.pidfd)


def open_pidfd(pid: int) -> int | None:
    """A file descriptor that stands for a process of this node; None where that is not to be had."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            return os.pidfd_open(pid)
    return None


class RankFailedError(Exception):
    """A worker is gone, failed or does not answer; the whole worker group is lost with it."""

    def __init__(self, rank: Rank, reason: str, failure: Failure | None = None, hangs: bool = False) -> None:
        super().__init__(f"{rank} {reason}")
        self.rank = rank
        self.failure = failure
        self.hangs = hangs


class WorkerGroup:
    """All ranks. Every method but `check`, `kill` and `phases` belongs to the thread that drives the steps."""

    def __init__(self, ranks: list[Rank]) -> None:
        assert ranks, "a worker group has at least one worker"
        self.ranks = ranks
        self._signs = SignsOfLife({rank.rank: rank.lifeline for rank in ranks if rank.lifeline is not None})

    def broadcast(self, frame: bytes, timeout_s: float) -> None:
        """Send one frame to every rank; RankFailedError names the one that is gone or does not take it."""
        for rank in self.ranks:
            self.send(rank, frame, timeout_s)

    def send(self, rank: Rank, frame: bytes, timeout_s: float) -> None:
        """Send one frame to one rank; RankFailedError as for `broadcast`."""
        try:
            rank.connection.send(frame, timeout_s)
        except TimeoutError:
            raise RankFailedError(
                rank, f"did not take a step message within {timeout_s:g} s: it hangs", hangs=True
            ) from None
        except ConnectionLostError:
            raise RankFailedError(rank, "is gone") from None

    def gather(self, timeout_s: float | None) -> list[bytes]:
        """Next frame of every rank, in the order of ranks. Asleep in between.

        RankFailedError as soon as any rank is gone or says that it failed (even while another one waits for it), or
        after `timeout_s`.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        frames: dict[int, bytes] = {}
        while True:
            for rank in self.ranks:
                if rank.rank not in frames and (frame := _arrived(rank)) is not None:
                    frames[rank.rank] = frame
            if len(frames) == len(self.ranks):
                return [frames[rank.rank] for rank in self.ranks]
            pending = [rank for rank in self.ranks if rank.rank not in frames]
            if not self._wait(pending, deadline):
                raise RankFailedError(pending[0], f"did not answer within {timeout_s:g} s: it hangs", hangs=True)

    def _wait(self, pending: list[Rank], deadline: float | None) -> bool:
        """Sleep until a pending rank sends or any rank hangs up; False at the deadline."""
        poll = select.poll()
        for rank in self.ranks:
            if rank.connection.fileno() < 0:  # closed by a shutdown in another thread
                raise RankFailedError(rank, "was shut down")
            poll.register(rank.connection, HANG_UP_EVENTS | (select.POLLIN if rank in pending else 0))
        ready = dict(poll.poll(None if deadline is None else max(0.0, deadline - time.monotonic()) * 1000))
        for rank in self.ranks:
            if rank not in pending and rank.connection.fileno() in ready:
                raise RankFailedError(rank, "is gone")
        return bool(ready)

    def check(self, within_s: float = 0.0) -> None:
        """Raise RankFailedError if a rank is gone, or goes `within_s`; from any thread."""
        for rank in self.ranks:
            if rank.connection.hung_up(within_s):
                raise RankFailedError(rank, "is gone")

    def check_signs_of_life(self) -> None:
        """Raise RankFailedError if a rank has not answered for seconds; from any thread, about once a second."""
        if (silent := self._signs.look()) is not None:
            raise RankFailedError(self.ranks[silent], "gives no sign of life: stopped, or stuck outside Python")

    @property
    def is_compiling(self) -> bool:
        """True if a rank was compiling a kernel when it was last asked."""
        return any(COMPILING in answer for answer in self._signs.answers.values())

    def kill(self) -> None:
        """SIGKILL every rank of this node; those of other nodes end when their connections close."""
        for rank in self.ranks:
            rank.kill()

    def phases(self) -> dict[int, str | None]:
        """Asks what each rank is doing, in words; None: it does not even say that (stopped, or stuck outside
        Python)."""
        told = self._signs.ask_all()
        return {rank.rank: told.get(rank.rank) for rank in self.ranks}


def _arrived(rank: Rank) -> bytes | None:
    """The rank's next frame, if it is there."""
    try:
        frame = rank.connection.try_recv()
    except ConnectionLostError:
        raise RankFailedError(rank, "is gone") from None
    if frame is not None and frame[:1] == FAILED:
        failure: Failure = pickle.loads(frame[1:])
        raise RankFailedError(rank, f"failed: {failure.message}", failure)
    return frame
