"""All replicas of one model, changed together: each is what an operator asked for, or each is what it was before.

A change is told before it begins and after it has ended. Where a replica fails in between, all are brought back; one
that cannot be is taken out: its process ends, and the one that Serve starts in its stead joins with what the fleet is.
"""

from __future__ import annotations

import asyncio
import logging
import math
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from app.api.engine_client import ReplicaAnswer
from app.deployments.admin.fleet_state import (
    CHANGES,
    TRANSFER_BEGINS,
    TRANSFER_ENDS,
    FleetState,
    MemberReport,
    latest,
    sent_revision,
)
from app.deployments.admin.transfer_watch import TransferWatch
from app.errors import EngineDeadError, InvalidRequestError, MantaError

BACK_TIMEOUT_S = 600.0  # bringing a replica back may mean to read its weights again
RESUME_TIMEOUT_S = 30.0
NEW_WEIGHTS = {"update_weights": "check_weights", "reload_weights": ""}  # and the call that looks whether they fit

logger = logging.getLogger("manta.admin")


class FleetPort(Protocol):
    """The running replicas of one model. What one does not answer in time is an error of its own."""

    async def members(self) -> list[MemberReport]:
        """Those that answer."""

    async def tell(self, replica_ids: Sequence[str], state: FleetState) -> list[str]:
        """Which of them have joined, and follow the state from now on."""

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


class ModelFleet:
    """One model's. Lives on one event loop, in the Admin."""

    def __init__(self, model: str, port: FleetPort, transfer_idle_s: float = math.inf) -> None:
        """`transfer_idle_s`: a transfer of weights without a call for so long is taken back."""
        self.model = model
        self.state = FleetState()
        self._port = port
        self._transfer = TransferWatch(transfer_idle_s)
        self._lock = asyncio.Lock()
        self._recovered = asyncio.Event()

    async def recover(self) -> None:
        """Learn what the fleet is from those that were told by an Admin before this one; a change that it left behind
        is taken back."""
        async with self._lock:
            await self._learn(await self._port.members())
            self._recovered.set()

    async def known_state(self) -> FleetState:
        """What a replica that starts is to become."""
        await self._recovered.wait()
        return self.state

    async def describe(self) -> dict[str, Any]:
        """What the fleet is to be, and what each replica is."""
        members = sorted(await self._port.members(), key=lambda member: member.index)
        asked = await self._port.control({one.replica_id: {} for one in members}, "describe", 10.0)
        states = {one.replica_id: one.result for one in asked if one.error is None}
        found = [_describe(member, states.get(member.replica_id)) for member in members]
        revisions = sorted({str(one["model_revision"]) for one in found if one["model_revision"]})
        return {"name": self.model, "model_revision": revisions, "fleet": self.state.as_json(), "replicas": found}

    async def control(self, name: str, arguments: Mapping[str, Any], timeout_s: float) -> list[ReplicaAnswer]:
        """See Fleet.control."""
        await self._recovered.wait()
        with self._transfer.during(name):
            return await self._control(name, arguments, timeout_s)

    async def _control(self, name: str, arguments: Mapping[str, Any], timeout_s: float) -> list[ReplicaAnswer]:
        async with self._lock:
            if name in NEW_WEIGHTS:
                return await self._new_weights(name, arguments, timeout_s)
            if name == TRANSFER_BEGINS:
                return await self._begin_transfer(arguments, timeout_s)
            if name == TRANSFER_ENDS:
                return await self._end_transfer(arguments, timeout_s)
            if name in CHANGES:
                return await self._change(name, arguments, timeout_s)
            if name == "init_weight_transfer_engine":
                return await self._join_transfer(arguments, timeout_s)
            if name == "receive_weights":
                self._check_under_way(name)
        return await self._all(name, arguments, timeout_s)  # the others wait for nobody

    async def drain(self, replica_id: str, is_drained: bool, move: bool) -> bool:
        """Whether there was such a replica."""
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
            if await self._learn(members):  # they were silent when this Admin began
                return
            joined = [one.replica_id for one in members if one.state is not None]
            if self.state.is_changing:
                await self._give_up_transfer(joined)
                return
            lost = [one.replica_id for one in members if one.state is not None and one.state != self.state]
            if lost:
                logger.warning("%s: %s missed what the fleet was told; restarted", self.model, ", ".join(lost))
                await self._port.leave(lost)

    # ---- under the lock

    async def _learn(self, members: Sequence[MemberReport]) -> bool:
        """Whether one of these was told something later than what is known here; then all become that."""
        told = latest([member.state for member in members])
        if told is None or told.epoch <= self.state.epoch:
            return False
        self.state = told.next()
        await self._bring_all_back([member.replica_id for member in members if member.state is not None])
        return True

    async def _joined(self) -> list[str]:
        return [member.replica_id for member in await self._port.members() if member.state is not None]

    async def _all(self, name: str, arguments: Mapping[str, Any], timeout_s: float) -> list[ReplicaAnswer]:
        members = await self._joined()
        if not members:
            raise EngineDeadError(f"{name}: model {self.model} has no replica that answers")
        return await self._call(members, name, arguments, timeout_s)

    async def _begin(self, name: str) -> list[str]:
        """Tell all that a change begins; who takes part in it. Others have not joined, and will wait for its end."""
        if self.state.is_changing:
            raise InvalidRequestError(
                f"{name}: weights are under way from another process: finish_weight_update, or reload_weights"
            )
        self.state = self.state.next(is_changing=True)
        members = await self._port.members()
        told = await self._port.tell([member.replica_id for member in members], self.state)
        if not told:
            await self._settle(self.state, [])
            raise EngineDeadError(f"{name}: model {self.model} has no replica that answers")
        return told

    async def _settle(self, state: FleetState, members: Sequence[str]) -> None:
        """Tell all that the change has ended, and what came of it."""
        self.state = state.next()
        deaf = set(members) - set(await self._port.tell(members, self.state))
        if deaf:
            await self._port.leave(sorted(deaf))

    async def _change(self, name: str, arguments: Mapping[str, Any], timeout_s: float) -> list[ReplicaAnswer]:
        members = await self._begin(name)
        answers = await self._call(members, name, arguments, timeout_s)
        await self._raise_failed(answers, members)
        await self._settle(self.state.after(name, arguments), members)
        return answers

    async def _new_weights(self, name: str, arguments: Mapping[str, Any], timeout_s: float) -> list[ReplicaAnswer]:
        """All are held before the first has new weights, and until the last has them."""
        if check := NEW_WEIGHTS[name]:
            looked = await self._all(check, {"path": arguments.get("path", "")}, timeout_s)
            if any(one.error for one in looked):
                return looked  # nothing has changed
        mode = arguments.get("mode", "wait")
        if self.state.is_changing:  # a transfer that was begun, for which all stand still: these come in its stead
            members, mode = await self._joined(), "keep"
        else:
            members = await self._begin(name)
        await self._raise_failed(await self._call(members, "pause", {"mode": mode}, timeout_s), members)
        answers = await self._call(members, name, {**arguments, "mode": "keep"}, timeout_s)
        await self._raise_failed(answers, members)
        await self._raise_failed(_different(answers), members)
        await self._settle(self.state.after(name, arguments, str(answers[0].result)), members)
        await self._resume(members)
        return answers

    async def _resume(self, members: Sequence[str]) -> None:
        """After new weights have come to all."""
        if self.state.is_paused:
            return
        answers = await self._call(members, "resume", {}, RESUME_TIMEOUT_S)
        self._warn(answers)
        if held := [one.replica_id for one in answers if one.error is not None]:
            await self._port.leave(held)

    async def _begin_transfer(self, arguments: Mapping[str, Any], timeout_s: float) -> list[ReplicaAnswer]:
        members = await self._begin(TRANSFER_BEGINS)
        answers = await self._call(members, "pause", {"mode": arguments.get("mode", "wait")}, timeout_s)
        await self._raise_failed(answers, members)
        answers = await self._call(members, TRANSFER_BEGINS, {"mode": "keep"}, timeout_s)
        await self._raise_failed(answers, members)
        return answers

    async def _give_up_transfer(self, members: Sequence[str]) -> None:
        """Where its sender has been silent for too long: all are as before, and requests go on."""
        if not self._transfer.is_given_up:
            return
        logger.error("%s: no word of new weights for %g s: taken back", self.model, self._transfer.limit_s)
        await self._bring_all_back(members)

    def _check_under_way(self, name: str) -> None:
        if not self.state.is_changing:
            raise InvalidRequestError(f"{name}: no weights are under way: {TRANSFER_BEGINS} first")

    async def _end_transfer(self, arguments: Mapping[str, Any], timeout_s: float) -> list[ReplicaAnswer]:
        self._check_under_way(TRANSFER_ENDS)
        members = await self._joined()
        revision = sent_revision(self.state, str(arguments.get("version", "")), uuid.uuid4().hex)
        told = {"revision": revision, "whole": arguments.get("whole", False)}
        answers = await self._call(members, TRANSFER_ENDS, told, timeout_s)
        await self._raise_failed(answers, members)
        await self._settle(self.state.after(TRANSFER_ENDS, arguments, revision), members)
        await self._resume(members)
        return answers

    async def _join_transfer(self, arguments: Mapping[str, Any], timeout_s: float) -> list[ReplicaAnswer]:
        """Each replica's ranks behind those of the one before."""
        members = await self._joined()
        described = await self._call(members, "describe", {}, timeout_s)
        if any(one.error for one in described):
            return described
        rank, own = arguments.get("rank_offset", 1), {}
        for one in described:
            own[one.replica_id] = {**arguments, "rank_offset": rank}
            rank += one.result["world_size"]
        if rank != arguments["world_size"]:
            raise InvalidRequestError(
                f"world_size: the workers of {len(members)} replicas have ranks up to {rank - 1}, so it is {rank}",
                param="init_info.world_size",
            )
        return await self._port.control(own, "init_weight_transfer_engine", timeout_s)

    async def _call(
        self, members: Sequence[str], name: str, arguments: Mapping[str, Any], timeout_s: float
    ) -> list[ReplicaAnswer]:
        return await self._port.control(dict.fromkeys(members, arguments), name, timeout_s)

    async def _raise_failed(self, answers: list[ReplicaAnswer], members: Sequence[str]) -> None:
        """Where one has failed: all are as before, and the error is raised, which says so."""
        failed = [one for one in answers if one.error is not None]
        if not failed:
            return
        gone = await self._bring_all_back(members)
        error = failed[0].error
        assert error is not None
        after = "all replicas are as they were before"
        if gone:
            after = f"{len(members) - len(gone)} replicas are as they were before; restarted: {', '.join(gone)}"
        raise type(error)(f"replica {failed[0].replica_id}: {error.message}; {after}", param=error.param)

    async def _bring_all_back(self, members: Sequence[str]) -> list[str]:
        """Bring these to the fleet's state; returns those that could not be, which are taken out."""
        answers = await self._port.bring_to(members, self.state, BACK_TIMEOUT_S)
        self._warn(answers)
        gone = [one.replica_id for one in answers if one.error is not None]
        if gone:
            await self._port.leave(gone)
        await self._settle(self.state, [name for name in members if name not in gone])
        return gone

    def _warn(self, answers: list[ReplicaAnswer]) -> None:
        for one in answers:
            if one.error is not None:
                logger.error("%s, replica %s: %s", self.model, one.replica_id, one.error.message)


def _different(answers: list[ReplicaAnswer]) -> list[ReplicaAnswer]:
    """An error for each replica whose new weights are not the first one's: a node has another directory there."""
    error: MantaError = InvalidRequestError("path: other weights than the first replica's", param="path")
    return [ReplicaAnswer(one.replica_id, error=error) for one in answers if one.result != answers[0].result]


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
