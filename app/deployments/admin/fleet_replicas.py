"""The replicas of one model that have joined its fleet, told and called together, and what they are to be.

A change is told before it begins and after it has ended. Where a replica fails in between, all are brought back; one
that cannot be is taken out: its process ends, and the one that Serve starts in its stead joins with what the fleet is.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from app.api.engine_client import ReplicaAnswer
from app.deployments.admin.fleet_state import FleetState, MemberReport, latest
from app.errors import EngineDeadError, InvalidRequestError

BACK_TIMEOUT_S = 600.0  # bringing a replica back may mean to read its weights again
RESUME_TIMEOUT_S = 30.0

logger = logging.getLogger("manta.admin")


class FleetPort(Protocol):
    """The running replicas of one model. What one does not answer in time is an error of its own."""

    async def members(self) -> list[MemberReport]:
        """Those that answer."""

    async def tell(self, replica_ids: Sequence[str], state: FleetState) -> list[str]:
        """Tells these the state, and returns those that have joined, and follow it from now on."""

    async def control(
        self, arguments: Mapping[str, Mapping[str, Any]], name: str, timeout_s: float
    ) -> list[ReplicaAnswer]:
        """A control call to each of these replicas, with arguments of its own."""

    async def bring_to(self, replica_ids: Sequence[str], state: FleetState, timeout_s: float) -> list[ReplicaAnswer]:
        """Let these become what `state` says."""

    async def leave(self, replica_ids: Sequence[str]) -> None:
        """End these; Serve starts others."""

    async def drain(self, replica_id: str, is_drained: bool, move: bool) -> bool:
        """Take one out of service, or back; whether it has answered."""


class FleetReplicas:
    """One model's. One caller at a time, but for `each`."""

    def __init__(self, model: str, port: FleetPort) -> None:
        self.model = model
        self.state = FleetState()
        self.port = port

    async def learn(self, members: Sequence[MemberReport]) -> bool:
        """Learns from these; True if one was told something later than what is known here: then all become that."""
        told = latest([member.state for member in members])
        if told is None or told.epoch <= self.state.epoch:
            return False
        self.state = told.next()
        await self.bring_all_back([member.replica_id for member in members if member.state is not None])
        return True

    async def joined(self) -> list[str]:
        """Those that follow what they are told."""
        return [member.replica_id for member in await self.port.members() if member.state is not None]

    # ---- calls

    async def each(self, name: str, arguments: Mapping[str, Any], timeout_s: float) -> list[ReplicaAnswer]:
        """A call to every one, which changes nothing that they share; EngineDeadError where there is none."""
        members = await self.joined()
        if not members:
            raise EngineDeadError(f"{name}: model {self.model} has no replica that answers")
        return await self.call(members, name, arguments, timeout_s)

    async def call(
        self, members: Sequence[str], name: str, arguments: Mapping[str, Any], timeout_s: float
    ) -> list[ReplicaAnswer]:
        """A call to these."""
        return await self.port.control(dict.fromkeys(members, arguments), name, timeout_s)

    async def all_or_none(
        self, members: Sequence[str], name: str, arguments: Mapping[str, Any], timeout_s: float
    ) -> list[ReplicaAnswer]:
        """A call to these, which is part of a change; see `raise_failed`."""
        answers = await self.call(members, name, arguments, timeout_s)
        await self.raise_failed(answers, members)
        return answers

    # ---- a change

    async def begin(self, name: str) -> list[str]:
        """Tell all that a change begins; who takes part in it. Others have not joined, and will wait for its end."""
        if self.state.is_changing:
            raise InvalidRequestError(
                f"{name}: weights are under way from another process: finish_weight_update, or reload_weights"
            )
        self.state = self.state.next(is_changing=True)
        members = await self.port.members()
        told = await self.port.tell([member.replica_id for member in members], self.state)
        if not told:
            await self.settle(self.state, [])
            raise EngineDeadError(f"{name}: model {self.model} has no replica that answers")
        return told

    async def settle(self, state: FleetState, members: Sequence[str]) -> None:
        """Tell all that the change has ended, and what came of it."""
        self.state = state.next()
        deaf = set(members) - set(await self.port.tell(members, self.state))
        if deaf:
            await self.port.leave(sorted(deaf))

    async def resume(self, members: Sequence[str]) -> None:
        """After new weights have come to all."""
        if self.state.is_paused:
            return
        answers = await self.call(members, "resume", {}, RESUME_TIMEOUT_S)
        self._warn(answers)
        if held := [one.replica_id for one in answers if one.error is not None]:
            await self.port.leave(held)

    async def raise_failed(self, answers: list[ReplicaAnswer], members: Sequence[str]) -> None:
        """Raises the error where one has failed: all are as before, and the error says so."""
        failed = [one for one in answers if one.error is not None]
        if not failed:
            return
        gone = await self.bring_all_back(members)
        error = failed[0].error
        assert error is not None
        after = "all replicas are as they were before"
        if gone:
            after = f"{len(members) - len(gone)} replicas are as they were before; restarted: {', '.join(gone)}"
        raise type(error)(f"replica {failed[0].replica_id}: {error.message}; {after}", param=error.param)

    async def bring_all_back(self, members: Sequence[str]) -> list[str]:
        """Bring these to the fleet's state; returns those that could not be, which are taken out."""
        answers = await self.port.bring_to(members, self.state, BACK_TIMEOUT_S)
        self._warn(answers)
        gone = [one.replica_id for one in answers if one.error is not None]
        if gone:
            await self.port.leave(gone)
        await self.settle(self.state, [name for name in members if name not in gone])
        return gone

    def _warn(self, answers: list[ReplicaAnswer]) -> None:
        for one in answers:
            if one.error is not None:
                logger.error("%s, replica %s: %s", self.model, one.replica_id, one.error.message)
