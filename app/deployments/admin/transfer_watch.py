"""How long a transfer of weights has stood still: a trainer that leaves in the midst of one must not hold requests for
good."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from app.deployments.admin.fleet_state import TRANSFER_BEGINS, TRANSFER_ENDS, TRANSFER_PARTS

_CALLS = {TRANSFER_BEGINS, TRANSFER_ENDS, *TRANSFER_PARTS}


class TransferWatch:
    """Sees every control call of one model; `limit_s`: seconds without one of the transfer's own."""

    def __init__(self, limit_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.limit_s = limit_s
        self._clock = clock
        self._num_under_way = 0
        self._ended_at = clock()

    @contextmanager
    def during(self, name: str) -> Iterator[None]:
        """A control call is made within the block; those that are no part of a transfer do not count."""
        if name not in _CALLS:
            yield
            return
        self._num_under_way += 1
        try:
            yield
        finally:
            self._num_under_way -= 1
            self._ended_at = self._clock()

    @property
    def is_given_up(self) -> bool:
        """Whether the sender has been silent for too long."""
        return not self._num_under_way and self._clock() - self._ended_at > self.limit_s
