"""A replica's part in the fleet: it follows what the Admin tells it, and begins with what the fleet is by then.

A replica takes no request before it has joined: Serve counts it as running by then, so the Admin that begins a change
reaches it, or the replica sees that the change is under way and waits for its end. Of the two, one always holds: the
Admin says that it begins before it looks who is there, and a replica that was looked at while it joined asks again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from app.deployments.admin.fleet_state import FleetState, latest
from app.errors import InvalidRequestError, MantaError
from app.records.adapter import KnownAdapter
from app.records.engine_state import TAGS
from app.records.stats import EngineStats

POLL_S = 0.2

logger = logging.getLogger("manta.engine")

Control = Callable[[str, Mapping[str, Any]], Awaitable[Any]]


class FleetMember:
    """Lives on one event loop. `control` makes a control call of the replica's engine."""

    def __init__(self, control: Control, own_revision: str, own_adapters: tuple[KnownAdapter, ...] = ()) -> None:
        """`own_revision`, `own_adapters`: of the configuration."""
        self.state: FleetState | None = None  # None: not joined
        self.error = ""
        self._control = control
        self._own_revision = own_revision
        self._own_adapters = own_adapters
        self._looked_at = False

    @classmethod
    def of(cls, control: Control, stats: EngineStats) -> FleetMember:
        """Makes one whose engine is as its configuration has it."""
        return cls(control, stats.model_revision, stats.adapters.known)

    def look(self) -> FleetState | None:
        """The Admin looks who is there."""
        self._looked_at = True
        return self.state

    def tell_alone(self) -> None:
        """There is no Admin, and nobody to follow."""
        self.state = FleetState()

    def tell(self, state: FleetState) -> bool:
        """Tells it what the fleet is from now on; False where the replica has not joined, and will ask."""
        self._looked_at = True
        if self.state is None:
            return False
        if state.revision != self.state.revision:
            self.error = ""  # others have come
        self.state = latest([self.state, state])
        return True

    async def join(self, ask: Callable[[], Awaitable[FleetState]]) -> None:
        """Become what the fleet is; `ask` says what that is now. Returns once no change can have been missed."""
        applied = FleetState()
        while True:
            self._looked_at = False
            wanted = await ask()
            if wanted.is_changing:
                await asyncio.sleep(POLL_S)
            elif wanted.epoch != applied.epoch:
                await self._become(wanted)
                applied = wanted
            elif not self._looked_at:
                self.state = wanted
                return

    async def _become(self, state: FleetState) -> None:
        self.error = ""
        try:
            await self.bring_to(state)
        except MantaError as error:
            self.error = error.message
            logger.error("this replica cannot become what the fleet is, and takes no requests: %s", error.message)
            await self._control("sleep", {"level": 2, "mode": "abort"})
            await self._control("wake_up", {})  # without weights, until the fleet gets others

    async def bring_to(self, state: FleetState) -> None:
        """Make the engine what `state` says, whatever it is; MantaError where that cannot be."""
        now = await self._control("describe", {})
        if not self._matches(now, state):
            await self._rebuild(now, state)
        await self._bring_adapters(now, state)
        await self._control("pause" if state.is_paused else "resume", {"mode": "keep"} if state.is_paused else {})
        self.error = ""

    async def _rebuild(self, now: Mapping[str, Any], state: FleetState) -> None:
        """From awake to asleep, as the fleet went."""
        if now["asleep"]:
            await self._control("wake_up", {})
        if state.sleep_level < 2:
            await self._bring_weights(state)
        if state.sleep_level:
            await self._control("sleep", {"level": state.sleep_level, "mode": "keep"})
            if awake := [tag for tag in TAGS if tag not in state.asleep]:
                await self._control("wake_up", {"tags": awake})
        if state.sleep_level == 2 and _has_weights(state):
            await self._bring_weights(state)

    async def _bring_adapters(self, now: Mapping[str, Any], state: FleetState) -> None:
        """Serve what all serve, and nothing else."""
        served = {one["name"]: one["digest"] for one in now["adapters"]}
        wanted = self._own_adapters if state.adapters is None else state.adapters
        for name in served.keys() - {one.name for one in wanted}:
            await self._control("unload_adapter", {"name": name})
        for one in wanted:
            if served.get(one.name) == one.digest:
                continue
            digest = await self._control("load_adapter", {"name": one.name, "path": one.path})
            if digest != one.digest:
                raise InvalidRequestError(f"{one.path} holds another adapter by now")

    def _matches(self, now: Mapping[str, Any], state: FleetState) -> bool:
        if now["sleep_level"] != state.sleep_level or set(now["asleep"]) != state.asleep:
            return False
        if not _has_weights(state):
            return True
        return not now["weights_missing"] and now["model_revision"] == self._wanted(state)

    def _wanted(self, state: FleetState) -> str:
        return state.revision or self._own_revision

    async def _bring_weights(self, state: FleetState) -> None:
        now = await self._control("describe", {})
        if not now["weights_missing"] and now["model_revision"] == self._wanted(state):
            return
        if state.is_sent:
            raise InvalidRequestError("its weights came from another process: send them again, or reload_weights")
        if state.weights is None:
            revision = await self._control("reload_weights", {"mode": "keep"})
        else:
            revision = await self._control("update_weights", {"path": state.weights, "mode": "keep"})
        if revision != self._wanted(state):
            raise InvalidRequestError(f"{state.weights or 'the model directory'} has other weights by now")


def _has_weights(state: FleetState) -> bool:
    """True if its engines hold weights, on the device or in host memory."""
    return not state.weights_missing and not (state.sleep_level == 2 and "weights" in state.asleep)
