"""Lets requests wait for the first replica of a model that has none: it sleeps, or its replicas are being started.

Those that wait because the Router says so are counted with them. Nobody else knows of them, so their number is what
wakes the model, or more replicas of it (`record_autoscaling_stats` of the ingress).

The room is shared fairly: where it is full, a request of a tenant that has fewer waiting takes the place of the last
one of the tenant that has most. Requests wait here, too, while an operator holds all replicas; that wakes none.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from app.config.autoscaling import AutoscalingConfig
from app.deployments.ingress.claims import seconds_left
from app.errors import EngineDeadError, EngineHeldError, OverloadedError
from app.records.request import EngineRequest

POLL_S = 0.05
HELD_WAIT_S = 60.0


def no_replica_error(model: str) -> EngineDeadError:
    """Returns the error for a client whose request no replica of the model takes."""
    return EngineDeadError(
        f"no engine replica of model {model!r} can take requests at the moment; the request may be sent again"
    )


@dataclass(slots=True, eq=False)
class _Waiting:
    """A request in the room. `is_displaced`: another tenant's has its place."""

    num_prompts: int
    is_displaced: bool = False


class WaitingRoom:
    """One model's, in one ingress. Without `options` the number of replicas is fixed, and nobody waits for the first.

    `held_wait_s`: how long at most a request waits while an operator holds all replicas.
    """

    def __init__(self, model: str, options: AutoscalingConfig | None = None, held_wait_s: float = HELD_WAIT_S) -> None:
        self.num_requests = 0  # of a bundle, its prompts
        self.num_tokens = 0  # of their prompts
        self._model = model
        self._options = options
        self._held_wait_s = held_wait_s
        self._of_tenant: dict[str, dict[_Waiting, None]] = {}  # in the order of their coming

    async def wait(self, request: EngineRequest, is_open: Callable[[], bool]) -> None:
        """Until `is_open`: a replica takes requests. EngineDeadError when none does in time, OverloadedError when too
        many wait already, DeadlineError."""
        options = self._options
        if options is None:
            raise no_replica_error(self._model)
        self._make_room(request, options.max_wake_waiting)
        deadline = time.monotonic() + options.wake_wait_s
        with self.counted(request), self._place_of(request) as place:
            while not is_open():
                if place.is_displaced:
                    raise self._full_error()
                if time.monotonic() > deadline:
                    raise EngineDeadError(
                        f"no replica of model {self._model!r} has started within {options.wake_wait_s:g} s; it had none"
                    )
                seconds_left(request)
                await asyncio.sleep(POLL_S)

    async def wait_held(self, request: EngineRequest, is_open: Callable[[], bool], why: Callable[[], str]) -> None:
        """Until `is_open`, or no replica is held any more; EngineHeldError when that takes too long, DeadlineError.
        `why` they are held; empty once they are not."""
        deadline = time.monotonic() + self._held_wait_s
        while (reason := why()) and not is_open():
            if time.monotonic() >= deadline:
                raise EngineHeldError(
                    f"requests to model {self._model!r} wait: {reason}; this one has waited for {self._held_wait_s:g} s"
                    " and may be sent again"
                )
            seconds_left(request)
            await asyncio.sleep(POLL_S)

    @contextmanager
    def counted(self, request: EngineRequest) -> Iterator[None]:
        """Count a request that waits, within the block: no replica knows of it yet."""
        self.num_requests += request.num_prompts
        self.num_tokens += request.num_known_tokens
        try:
            yield
        finally:
            self.num_requests -= request.num_prompts
            self.num_tokens -= request.num_known_tokens

    @contextmanager
    def _place_of(self, request: EngineRequest) -> Iterator[_Waiting]:
        tenant, place = request.placement.tenant, _Waiting(request.num_prompts)
        self._of_tenant.setdefault(tenant, {})[place] = None
        try:
            yield place
        finally:
            self._leave(tenant, place)

    def _leave(self, tenant: str, place: _Waiting) -> None:
        places = self._of_tenant.get(tenant, {})
        places.pop(place, None)
        if not places:
            self._of_tenant.pop(tenant, None)

    def _make_room(self, request: EngineRequest, most: int) -> None:
        """Send the last ones of the tenants that have most away while the room is full, unless the request's own would
        have as much then: OverloadedError. A bundle of more prompts than the room takes enters one that is not full."""
        held = {name: sum(place.num_prompts for place in places) for name, places in self._of_tenant.items()}
        would_have = held.get(request.placement.tenant, 0) + request.num_prompts
        last_first = {name: reversed(places) for name, places in self._of_tenant.items()}
        leaving: list[tuple[str, _Waiting]] = []  # nobody goes for a request that is refused
        while sum(held.values()) >= most:
            largest = max(held, key=lambda name: held[name])
            last = next(last_first[largest])
            held[largest] -= last.num_prompts
            if held[largest] < would_have:
                raise self._full_error()
            leaving.append((largest, last))
        for tenant, place in leaving:
            place.is_displaced = True
            self._leave(tenant, place)

    def _full_error(self) -> OverloadedError:
        return OverloadedError(
            f"{self.num_requests} requests wait for the first replica of model {self._model!r} already; try later"
        )
