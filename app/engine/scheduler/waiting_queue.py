"""Requests without a row, in the order of service."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator

from app.engine.scheduler.queue_load import QueueLoad
from app.engine.scheduler.request import Request


def _key(request: Request) -> tuple[int, int]:
    return request.key


class WaitingQueue:
    """Sorted by `Request.key`, which is unique: FCFS and priority are one order, and who returns finds their place."""

    def __init__(self, num_known_tokens: Callable[[Request], int] = lambda request: 0) -> None:
        """`num_known_tokens`: see QueueLoad."""
        self._requests: list[Request] = []
        self.load = QueueLoad(num_known_tokens)

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def push(self, request: Request) -> None:
        """Add a new or preempted request at its place."""
        insort(self._requests, request, key=_key)
        self.load.add(request)

    def remove(self, request: Request) -> None:
        """Take out one request, from anywhere."""
        index = bisect_left(self._requests, request.key, key=_key)
        assert self._requests[index] is request
        del self._requests[index]
        self.load.remove(request)
