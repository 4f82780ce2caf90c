"""The workers of one executor, as the driver sees them: ranks in order, each with its actor and its connection."""

from __future__ import annotations

import select
import time
from dataclasses import dataclass
from typing import Any

from app.engine.executor.transports.connection import HANG_UP_EVENTS, ConnectionLostError, FrameConnection


@dataclass(frozen=True, slots=True)
class Rank:
    """One worker: its Ray actor handle, its connection, and where it runs."""

    rank: int
    actor: Any
    connection: FrameConnection
    pid: int
    host: str
    same_node: bool  # as the driver

    def __str__(self) -> str:
        return f"worker rank {self.rank} (pid {self.pid} on {self.host})"


class RankFailedError(Exception):
    """A worker is gone or does not answer; the whole gang is lost with it."""

    def __init__(self, rank: Rank, reason: str) -> None:
        super().__init__(f"{rank} {reason}")
        self.rank = rank


class Gang:
    """All ranks. Every method but `check` belongs to the thread that drives the steps."""

    def __init__(self, ranks: list[Rank]) -> None:
        assert ranks, "a gang has at least one worker"
        self.ranks = ranks

    def broadcast(self, frame: bytes, timeout_s: float) -> None:
        """Send one frame to every rank; RankFailedError names the one that is gone or does not take it."""
        for rank in self.ranks:
            try:
                rank.connection.send(frame, timeout_s)
            except TimeoutError:
                raise RankFailedError(rank, f"did not take a letter within {timeout_s:g} s: it hangs") from None
            except ConnectionLostError:
                raise RankFailedError(rank, "is gone") from None

    def gather(self, timeout_s: float) -> list[bytes]:
        """Next frame of every rank, in the order of ranks. Asleep in between.

        RankFailedError as soon as any rank is gone (even while another one waits for it), or after `timeout_s`.
        """
        deadline = time.monotonic() + timeout_s
        frames: dict[int, bytes] = {}
        while True:
            for rank in self.ranks:
                if rank.rank in frames:
                    continue
                try:
                    frame = rank.connection.try_recv()
                except ConnectionLostError:
                    raise RankFailedError(rank, "is gone") from None
                if frame is not None:
                    frames[rank.rank] = frame
            if len(frames) == len(self.ranks):
                return [frames[rank.rank] for rank in self.ranks]
            pending = [rank for rank in self.ranks if rank.rank not in frames]
            if not self._wait(pending, deadline):
                raise RankFailedError(pending[0], f"did not answer within {timeout_s:g} s: it hangs")

    def _wait(self, pending: list[Rank], deadline: float) -> bool:
        """Sleep until a pending rank sends or any rank hangs up; False at the deadline."""
        poll = select.poll()
        for rank in self.ranks:
            if rank.connection.fileno() < 0:  # closed by a shutdown in another thread
                raise RankFailedError(rank, "was shut down")
            poll.register(rank.connection, HANG_UP_EVENTS | (select.POLLIN if rank in pending else 0))
        ready = dict(poll.poll(max(0.0, deadline - time.monotonic()) * 1000))
        for rank in self.ranks:
            if rank not in pending and rank.connection.fileno() in ready:
                raise RankFailedError(rank, "is gone")
        return bool(ready)

    def check(self, within_s: float = 0.0) -> None:
        """Raise RankFailedError if a rank is gone, or goes `within_s`; from any thread."""
        for rank in self.ranks:
            if rank.connection.hung_up(within_s):
                raise RankFailedError(rank, "is gone")
