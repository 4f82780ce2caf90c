"""The control calls that change what a fleet is: a line says how one is made at all replicas, and what comes of it.

Calls without a line change nothing that replicas share (EACH).
"""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from app.api.engine_client import ReplicaAnswer
from app.deployments.admin.fleet_replicas import FleetReplicas
from app.deployments.admin.fleet_state import FleetState, sent_revision
from app.errors import InvalidRequestError, MantaError
from app.records.adapter import KnownAdapter

Arguments = Mapping[str, Any]
Answers = list[ReplicaAnswer]


@dataclass(frozen=True, slots=True)
class FleetCall:
    """A line. `make` begins while no change runs; `after` gives the state that the call leaves behind, by its
    arguments and the revision of the weights that it has brought."""

    make: Callable[[FleetReplicas, str, Arguments, float], Awaitable[Answers]]
    after: Callable[[FleetState, Arguments, str], FleetState] = lambda state, arguments, revision: state
    check: str = ""  # a call that is made first and changes nothing; where it fails at one, nothing is changed
    is_of_transfer: bool = False  # part of a transfer of weights from another process
    is_alone: bool = True  # no other call begins before this one has ended


async def each(fleet: FleetReplicas, name: str, arguments: Arguments, timeout_s: float) -> Answers:
    """Makes the call at all; what one answers is nothing to the others."""
    return await fleet.each(name, arguments, timeout_s)


async def change(fleet: FleetReplicas, name: str, arguments: Arguments, timeout_s: float) -> Answers:
    """Makes the call at all, or brings all back."""
    members = await fleet.begin(name)
    answers = await fleet.all_or_none(members, name, arguments, timeout_s)
    await fleet.settle(FLEET_CALLS[name].after(fleet.state, arguments, ""), members)
    return answers


async def new_weights(fleet: FleetReplicas, name: str, arguments: Arguments, timeout_s: float) -> Answers:
    """Holds all before the first has new weights, and until the last has them."""
    line = FLEET_CALLS[name]
    if line.check:
        looked = await fleet.each(line.check, {"path": arguments.get("path", "")}, timeout_s)
        if any(one.error for one in looked):
            return looked  # nothing has changed
    mode = arguments.get("mode", "wait")
    if fleet.state.is_changing:  # a transfer that was begun, for which all stand still: these come in its stead
        members, mode = await fleet.joined(), "keep"
    else:
        members = await fleet.begin(name)
    await fleet.all_or_none(members, "pause", {"mode": mode}, timeout_s)
    answers = await fleet.all_or_none(members, name, {**arguments, "mode": "keep"}, timeout_s)
    await fleet.raise_failed(_different(answers), members)
    await fleet.settle(line.after(fleet.state, arguments, str(answers[0].result)), members)
    await fleet.resume(members)
    return answers


async def change_adapters(fleet: FleetReplicas, name: str, arguments: Arguments, timeout_s: float) -> Answers:
    """Makes the call at all, or brings all back; from then on all serve what they say that they serve."""
    members = await fleet.begin(name)
    answers = await fleet.all_or_none(members, name, arguments, timeout_s)
    described = await fleet.all_or_none(members, "describe", {}, timeout_s)
    served = [tuple(KnownAdapter(**one) for one in each.result["adapters"]) for each in described]
    await fleet.raise_failed(_unlike(described, served), members)
    await fleet.settle(fleet.state.adapted(served[0]), members)
    return answers


async def begin_transfer(fleet: FleetReplicas, name: str, arguments: Arguments, timeout_s: float) -> Answers:
    """Holds all, and tells all that weights come; the change ends with `end_transfer`."""
    members = await fleet.begin(name)
    await fleet.all_or_none(members, "pause", {"mode": arguments.get("mode", "wait")}, timeout_s)
    return await fleet.all_or_none(members, name, {"mode": "keep"}, timeout_s)


async def join_transfer(fleet: FleetReplicas, name: str, arguments: Arguments, timeout_s: float) -> Answers:
    """Lets each replica's ranks join the sender's group behind those of the one before."""
    members = await fleet.joined()
    described = await fleet.call(members, "describe", {}, timeout_s)
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
    return await fleet.port.control(own, name, timeout_s)


async def receive(fleet: FleetReplicas, name: str, arguments: Arguments, timeout_s: float) -> Answers:
    """Lets all take in what the sender broadcasts."""
    check_under_way(fleet, name)
    return await fleet.each(name, arguments, timeout_s)


async def end_transfer(fleet: FleetReplicas, name: str, arguments: Arguments, timeout_s: float) -> Answers:
    """All compute with what has come, under one revision; ends the change of `begin_transfer`."""
    check_under_way(fleet, name)
    members = await fleet.joined()
    revision = sent_revision(fleet.state, str(arguments.get("version", "")), uuid.uuid4().hex)
    told = {"revision": revision, "whole": arguments.get("whole", False)}
    answers = await fleet.all_or_none(members, name, told, timeout_s)
    await fleet.settle(FLEET_CALLS[name].after(fleet.state, arguments, revision), members)
    await fleet.resume(members)
    return answers


def check_under_way(fleet: FleetReplicas, name: str) -> None:
    """InvalidRequestError where no transfer has begun."""
    if not fleet.state.is_changing:
        raise InvalidRequestError(f"{name}: no weights are under way: start_weight_update first")


def _different(answers: Answers) -> Answers:
    """An error for each replica whose new weights are not the first one's: a node has another directory there."""
    error: MantaError = InvalidRequestError("path: other weights than the first replica's", param="path")
    return [ReplicaAnswer(one.replica_id, error=error) for one in answers if one.result != answers[0].result]


def _unlike(answers: Answers, served: list[tuple[KnownAdapter, ...]]) -> Answers:
    """An error for each replica that serves other adapters than the first one: a node has another directory there."""
    error: MantaError = InvalidRequestError("lora_path: another adapter than the first replica's", param="lora_path")
    known = {(one.name, one.digest) for one in served[0]}
    return [
        ReplicaAnswer(answer.replica_id, error=error)
        for answer, own in zip(answers, served, strict=True)
        if {(one.name, one.digest) for one in own} != known
    ]


FLEET_CALLS: Mapping[str, FleetCall] = {
    "pause": FleetCall(change, lambda state, *_: state.paused(True)),
    "resume": FleetCall(change, lambda state, *_: state.paused(False)),
    "sleep": FleetCall(change, lambda state, arguments, _: state.slept(arguments.get("level", 1))),
    "wake_up": FleetCall(change, lambda state, arguments, _: state.woken(arguments.get("tags"))),
    "update_weights": FleetCall(
        new_weights,
        lambda state, arguments, revision: state.loaded(arguments["path"], revision),
        check="check_weights",
    ),
    "load_adapter": FleetCall(change_adapters),
    "unload_adapter": FleetCall(change_adapters),
    "reload_weights": FleetCall(new_weights, lambda state, *_: state.loaded(None, "")),
    "start_weight_update": FleetCall(begin_transfer, is_of_transfer=True),
    "init_weight_transfer_engine": FleetCall(join_transfer, is_of_transfer=True),
    "receive_weights": FleetCall(receive, is_of_transfer=True, is_alone=False),
    "finish_weight_update": FleetCall(
        end_transfer, lambda state, _, revision: state.loaded(None, revision, is_sent=True), is_of_transfer=True
    ),
}
EACH = FleetCall(each, is_alone=False)
