"""Asks the workers what they are doing, over their lifelines, which answer also while a step computes or hangs.

A process that is stopped, or whose machine is gone without a word, does not answer: that shows within seconds however
long a step may take.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Mapping

from app.engine.executor.worker_group.connection import ConnectionLostError, FrameConnection

ASK = b"?"
ASK_INTERVAL_S = 1.0
MAX_UNANSWERED = 4  # questions are counted, not seconds: a pause of this process is none of the worker's
ANSWER_TIMEOUT_S = 1.0
_TROUBLE = (ConnectionLostError, TimeoutError, OSError, ValueError)  # the connection says on its own that it is lost


class SignsOfLife:
    """The ranks' last answers. From any thread; `look` never waits."""

    def __init__(self, lifelines: Mapping[int, FrameConnection]) -> None:
        self._lifelines = lifelines  # by rank
        self._lock = threading.Lock()
        self._asked_s = 0.0
        self._unanswered = dict.fromkeys(lifelines, 0)
        self.answers: dict[int, str] = {}

    def look(self) -> int | None:
        """Take in what the ranks have answered and ask again, once a second; the first rank that has left
        MAX_UNANSWERED times of asking without an answer, or None."""
        if self._lock.acquire(blocking=False):
            try:
                if time.monotonic() - self._asked_s >= ASK_INTERVAL_S:
                    self._asked_s = time.monotonic()
                    for rank in self._lifelines:
                        self._ask(rank)
            finally:
                self._lock.release()
        return next((rank for rank, count in self._unanswered.items() if count >= MAX_UNANSWERED), None)

    def ask_all(self, timeout_s: float = ANSWER_TIMEOUT_S) -> dict[int, str | None]:
        """Asks what each rank is doing, in words; None: it does not even say that in time."""
        found: dict[int, str | None] = dict.fromkeys(self._lifelines)
        with self._lock:
            deadline = time.monotonic() + timeout_s
            for rank, lifeline in self._lifelines.items():
                with contextlib.suppress(*_TROUBLE):
                    self._take_answers(rank)
                    lifeline.send(ASK, 0.0)
            for rank, lifeline in self._lifelines.items():
                with contextlib.suppress(*_TROUBLE):
                    found[rank] = lifeline.recv(max(0.0, deadline - time.monotonic())).decode()
        return found

    def _ask(self, rank: int) -> None:
        with contextlib.suppress(*_TROUBLE):
            self._take_answers(rank)
            self._unanswered[rank] += 1
            if self._unanswered[rank] == 1:  # one question at a time: a stopped worker's socket must not fill up
                self._lifelines[rank].send(ASK, 0.0)

    def _take_answers(self, rank: int) -> None:
        while (answer := self._lifelines[rank].try_recv()) is not None:
            self.answers[rank] = answer.decode()
            self._unanswered[rank] = 0
