"""Where requests wait for the first replica of a model that has none: it sleeps, or its replicas are being started.

Those that wait because the Router says so are counted with them. Nobody else knows of them, so their number is what
wakes the model, or more replicas of it (`record_autoscaling_stats` of the ingress).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from app.autoscaling_config import AutoscalingConfig
from app.engine.request import EngineRequest
from app.errors import EngineDeadError, OverloadedError

POLL_S = 0.05


def no_replica_error(model: str) -> EngineDeadError:
    """What a client is told whose request no replica of the model takes."""
    return EngineDeadError(
        f"no engine replica of model {model!r} can take requests at the moment; the request may be sent again"
    )


class WaitingRoom:
    """One model's, in one ingress. Without `options` the number of replicas is fixed, and nobody waits."""

    def __init__(self, model: str, options: AutoscalingConfig | None = None) -> None:
        self.num_requests = 0
        self.num_tokens = 0  # of their prompts
        self._model = model
        self._options = options

    async def wait(self, request: EngineRequest, is_open: Callable[[], bool]) -> None:
        """Until `is_open`: a replica takes requests. EngineDeadError when none does in time, OverloadedError when too
        many wait already."""
        options = self._options
        if options is None:
            raise no_replica_error(self._model)
        if self.num_requests >= options.max_wake_waiting:
            raise OverloadedError(
                f"{self.num_requests} requests wait for the first replica of model {self._model!r} already; try later"
            )
        deadline = time.monotonic() + options.wake_wait_s
        with self.counted(request):
            while not is_open():
                if time.monotonic() > deadline:
                    raise EngineDeadError(
                        f"no replica of model {self._model!r} has started within {options.wake_wait_s:g} s; it had none"
                    )
                await asyncio.sleep(POLL_S)

    @contextmanager
    def counted(self, request: EngineRequest) -> Iterator[None]:
        """Count a request that waits, within the block: no replica knows of it yet."""
        self.num_requests += 1
        self.num_tokens += request.num_known_tokens
        try:
            yield
        finally:
            self.num_requests -= 1
            self.num_tokens -= request.num_known_tokens
