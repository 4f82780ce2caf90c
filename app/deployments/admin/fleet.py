"""All replicas of one model, changed together: each is what an operator asked for, or each is what it was before."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

from app.api.engine_client import ReplicaAnswer
from app.deployments.admin.fleet_calls import EACH, FLEET_CALLS
from app.deployments.admin.fleet_replicas import FleetPort, FleetReplicas
from app.deployments.admin.fleet_state import FleetState, MemberReport
from app.deployments.admin.transfer_watch import TransferWatch
from app.errors import EngineDeadError

logger = logging.getLogger("manta.admin")


class ModelFleet:
    """One model's. Lives on one event loop, in the Admin."""

    def __init__(self, model: str, port: FleetPort, transfer_idle_s: float = math.inf) -> None:
        """`transfer_idle_s`: a transfer of weights without a call for so long is taken back."""
        self.model = model
        self._port = port
        self._replicas = FleetReplicas(model, port)
        self._transfer = TransferWatch(transfer_idle_s)
        self._lock = asyncio.Lock()
        self._recovered = asyncio.Event()

    @property
    def state(self) -> FleetState:
        """Returns what all replicas are to be."""
        return self._replicas.state

    async def recover(self) -> None:
        """Learn what the fleet is from those that were told by an Admin before this one; a change that it left behind
        is taken back."""
        async with self._lock:
            await self._replicas.learn(await self._port.members())
            self._recovered.set()

    async def known_state(self) -> FleetState:
        """Returns what a replica that starts is to become."""
        await self._recovered.wait()
        return self.state

    async def describe(self) -> dict[str, Any]:
        """Describes what the fleet is to be, and what each replica is."""
        members = sorted(await self._port.members(), key=lambda member: member.index)
        asked = await self._port.control({one.replica_id: {} for one in members}, "describe", 10.0)
        states = {one.replica_id: one.result for one in asked if one.error is None}
        found = [_describe(member, states.get(member.replica_id)) for member in members]
        revisions = sorted({str(one["model_revision"]) for one in found if one["model_revision"]})
        return {"name": self.model, "model_revision": revisions, "fleet": self.state.as_json(), "replicas": found}

    async def control(self, name: str, arguments: Mapping[str, Any], timeout_s: float) -> list[ReplicaAnswer]:
        """See Fleet.control."""
        await self._recovered.wait()
        call = FLEET_CALLS.get(name, EACH)
        with self._transfer.during() if call.is_of_transfer else nullcontext():
            async with self._lock:
                if call.is_alone:
                    return await call.make(self._replicas, name, arguments, timeout_s)
            return await call.make(self._replicas, name, arguments, timeout_s)

    async def drain(self, replica_id: str, is_drained: bool, move: bool) -> bool:
        """Takes one replica out of service, or back; False where there is no such replica."""
        if all(member.replica_id != replica_id for member in await self._port.members()):
            return False
        if not await self._port.drain(replica_id, is_drained, move):
            raise EngineDeadError(f"replica {replica_id} does not answer")
        return True

    async def look_after(self) -> None:
        """Take out those that do not follow: they missed what the others were told."""
        if self._lock.locked() or not self._recovered.is_set():
            return
        async with self._lock:
            members = await self._port.members()
            if await self._replicas.learn(members):  # they were silent when this Admin began
                return
            joined = [one.replica_id for one in members if one.state is not None]
            if self.state.is_changing:
                await self._give_up_transfer(joined)
                return
            lost = [one.replica_id for one in members if one.state is not None and one.state != self.state]
            if lost:
                logger.warning("%s: %s missed what the fleet was told; restarted", self.model, ", ".join(lost))
                await self._port.leave(lost)

    async def _give_up_transfer(self, members: Sequence[str]) -> None:
        """Takes back a transfer whose sender has been silent for too long: all are as before, and requests go on."""
        if not self._transfer.is_given_up:
            return
        logger.error("%s: no word of new weights for %g s: taken back", self.model, self._transfer.limit_s)
        await self._replicas.bring_all_back(members)


def _describe(member: MemberReport, state: Mapping[str, Any] | None) -> dict[str, Any]:
    if member.state is None:
        condition = "joining"
    else:
        condition = "drained" if member.is_drained else "failed" if member.error else "serving"
    names = ("model_revision", "is_paused", "sleep_level", "asleep", "weights_missing", "num_requests", "world_size")
    known = {name: state[name] if state is not None else None for name in names}
    return {
        "replica_id": member.replica_id,
        "index": member.index,
        "condition": condition,
        "error": member.error,
    } | known
