"""Keeps new requests away from replicas whose transport fails, as one ingress sees it (circuit breaker: Nygard, 2007).

What a replica answers never counts, whatever it says; only that it could not be reached, or was lost under requests.
After some faults in a row it is left alone for a while, which doubles each time. Then one request tries: once one has
ended well, the replica serves again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

FIRST_REST_S = 1.0
LONGEST_REST_S = 30.0
MAX_REPLICAS = 1024  # that are remembered
TRIAL_S = 5.0  # another request may try when the one before has told nothing for so long


@dataclass(slots=True)
class _Faults:
    number: int = 0  # in a row
    rest_s: float = FIRST_REST_S  # that the next opening lasts
    shut_until_s: float | None = None  # None: it has not had enough faults
    channel: str = ""  # that was lost last


class CircuitBreaker:
    """The circuits of one model's replicas, by their ids."""

    def __init__(self, num_faults: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._num_faults = num_faults
        self._clock = clock
        self._faults: dict[str, _Faults] = {}

    def usable(self, names: Collection[str]) -> Collection[str]:
        """Those of `names` that may be sent requests now; all, if there were none."""
        if not self._faults:
            return names
        now = self._clock()
        return [name for name in names if not self._is_shut(name, now)] or names

    def note_sent(self, name: str) -> None:
        """Note that a request goes there: to one that was shut, alone for a while."""
        faults = self._faults.get(name)
        if faults is not None and faults.shut_until_s is not None:
            faults.shut_until_s = self._clock() + TRIAL_S

    def fault(self, name: str, lost_channel: str = "") -> None:
        """It could not be reached; or a channel was lost, which counts once for all of its requests."""
        while len(self._faults) >= MAX_REPLICAS:  # that are gone, most of them
            del self._faults[next(iter(self._faults))]
        faults = self._faults.setdefault(name, _Faults())
        if lost_channel and faults.channel == lost_channel:
            return
        faults.channel = lost_channel
        faults.number += 1
        if faults.number >= self._num_faults:
            faults.shut_until_s = self._clock() + faults.rest_s
            faults.rest_s = min(2 * faults.rest_s, LONGEST_REST_S)

    def success(self, name: str) -> None:
        """A request that went there has ended well."""
        self._faults.pop(name, None)

    def _is_shut(self, name: str, now: float) -> bool:
        faults = self._faults.get(name)
        return faults is not None and faults.shut_until_s is not None and now < faults.shut_until_s
