"""A request that an engine replica sends itself when it has given no output for a while: does it still answer?

Real outputs answer the question too, so a busy replica sends none. One token of a request of the lowest priority; it
counts in nobody's metrics.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from app.errors import MantaError
from app.records.pooling_params import PoolingParams
from app.records.request import CANARY_TENANT, MAX_PRIORITY, EngineRequest, Placement
from app.records.sampling_params import SamplingParams

MAX_AGE_S = 15.0  # of the last output of a replica that is ready

GENERATE_ONE = SamplingParams(max_tokens=1, temperature=0.0, seed=0)

logger = logging.getLogger("manta.engine")


class Canary:
    """One replica's; `interval_s` 0: none is sent, and the replica counts as one that answers."""

    def __init__(
        self,
        interval_s: float,
        submit: Callable[[EngineRequest], None],
        work: SamplingParams | PoolingParams = GENERATE_ONE,
        asks: tuple[object, ...] = (),
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`submit` hands a request to the engine; `work` is something that its model does, `asks` what that
        takes besides a token."""
        self._interval_s = interval_s
        self._submit = submit
        self._work, self._asks = work, asks
        self._clock = clock
        self._answered_at = clock()
        self._sent_at = 0.0
        self._num_sent = 0

    @property
    def age_s(self) -> float:
        """Seconds since the last output of any request; 0 where none is sent."""
        return self._clock() - self._answered_at if self._interval_s else 0.0

    @property
    def answers(self) -> bool:
        """True if the last output is not long ago."""
        return self.age_s < max(MAX_AGE_S, 3 * self._interval_s)

    def postpone(self) -> None:
        """Send the next one later: the engine has given outputs."""
        self._answered_at = self._clock()

    def tick(self) -> None:
        """Send one if it is time; called about every second. One that is not answered is not followed by another."""
        if self.age_s < self._interval_s or not self._interval_s or self._sent_at > self._answered_at:
            return
        self._sent_at = self._clock()
        self._num_sent += 1
        place = Placement(priority=MAX_PRIORITY, cache_root=b"canary", tenant=CANARY_TENANT)
        try:
            self._submit(EngineRequest(f"canary-{self._num_sent}", [0], self._work, placement=place, asks=self._asks))
        except MantaError as error:
            logger.warning("the engine refuses a canary: %s", error.message)
