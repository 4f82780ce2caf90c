"""Replicas without engines or Ray: what control calls make of an engine's state, and a port to them all."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from app.api.engine_client import ReplicaAnswer
from app.deployments.admin.fleet_state import FleetState, MemberReport
from app.deployments.admin.member import FleetMember
from app.errors import EngineDeadError, InvalidRequestError, MantaError
from app.records.adapter import KnownAdapter
from app.records.engine_state import TAGS, EngineState

OWN = "own"


class FakeReplica:
    """An engine's state and its part in the fleet. A directory /x holds weights of revision x."""

    def __init__(self, name: str, log: list[Any]) -> None:
        self.name = name
        self.engine = EngineState()
        self.revision = OWN
        self.fails: dict[str, MantaError] = {}  # by control call, once each
        self.adapters: dict[str, KnownAdapter] = {}  # a directory /x holds adapter x
        self.is_gone = False
        self.is_drained = False
        self.gates: dict[str, asyncio.Event] = {}  # control calls that wait
        self.member = FleetMember(self.call, OWN)
        self._log = log

    async def call(self, name: str, arguments: Mapping[str, Any]) -> Any:
        if name in self.gates:
            await self.gates[name].wait()
        if error := self.fails.pop(name, None):
            raise error
        if name != "describe":
            self._log.append((self.name, name))
        return getattr(self, f"_{name}")(**arguments)

    @property
    def answers(self) -> str | None:
        """The weights that a request would be answered with now."""
        served = self.member.state is not None and not self.is_gone and not self.engine.is_paused
        return self.revision if served and self.engine.refusal is None else None

    def _describe(self) -> dict[str, Any]:
        engine = self.engine
        return {
            "is_paused": engine.is_paused, "sleep_level": engine.sleep_level, "asleep": sorted(engine.asleep),
            "weights_missing": engine.weights_missing, "model_revision": self.revision, "world_size": 2,
            "num_requests": 0, "adapters": [one._asdict() for one in self.adapters.values()],
        }  # fmt: skip

    def _pause(self, mode: str = "abort", clear_cache: bool = False) -> None:
        self.engine.holds.add("pause")

    def _resume(self) -> None:
        self.engine.holds.discard("pause")

    def _sleep(self, level: int = 1, mode: str = "abort") -> None:
        self.engine.holds.add("sleep")
        self.engine.asleep, self.engine.sleep_level = frozenset(TAGS), max(level, self.engine.sleep_level)

    def _wake_up(self, tags: list[Any] | None = None) -> None:
        wanted = self.engine.asleep & set(TAGS if tags is None else tags)
        self.engine.weights_missing |= "weights" in wanted and self.engine.sleep_level == 2
        self.engine.asleep -= wanted
        self._go_on()

    def _go_on(self) -> None:
        if not self.engine.asleep and not self.engine.weights_missing:
            self.engine.sleep_level = 0
            self.engine.holds.discard("sleep")

    def _load_adapter(self, name: str, path: str, in_place: bool = True) -> str:
        if path == "/broken":
            raise InvalidRequestError("lora_path: cannot be read", param="lora_path")
        digest = path.removeprefix("/") + (self.name if path == "/unlike" else "")
        self.adapters[name] = KnownAdapter(name, digest, path)
        return digest

    def _unload_adapter(self, name: str) -> bool:
        return self.adapters.pop(name, None) is not None

    def _check_weights(self, path: str) -> str:
        if path == "/bad":
            raise InvalidRequestError("path: these are weights of another model", param="path")
        return path.removeprefix("/")

    def _update_weights(self, path: str, mode: str = "wait") -> str:
        self._start_weight_update(mode)
        if path == "/broken":
            raise InvalidRequestError("path: cannot be read", param="path")
        return self._finish_weight_update(path.removeprefix("/"))

    def _reload_weights(self, mode: str = "wait") -> str:
        self._start_weight_update(mode)
        return self._finish_weight_update(OWN)

    def _start_weight_update(self, mode: str = "wait") -> None:
        if "weights" in self.engine.asleep:
            raise InvalidRequestError("the weights are asleep")
        self.engine.holds.add("update")
        self.engine.weights_missing = True

    def _receive_weights(self, **arguments: Any) -> int:
        return 1

    def _init_weight_transfer_engine(self, rank_offset: int, **arguments: Any) -> int:
        return rank_offset

    def _finish_weight_update(self, revision: str, whole: bool = True) -> str:
        self.revision, self.engine.weights_missing = revision, False
        self.engine.holds.discard("update")
        self._go_on()
        return revision

    def _reset_prefix_cache(self) -> bool:
        return True


class FakePort:
    """FleetPort; `on_call` is called before each control call, to look at the whole fleet."""

    def __init__(self, *replicas: FakeReplica) -> None:
        self.replicas = {one.name: one for one in replicas}
        self.deaf: set[str] = set()  # what these are told is lost
        self.left: list[str] = []

    async def members(self) -> list[MemberReport]:
        there = [one for one in self.replicas.values() if not one.is_gone]
        return [MemberReport(one.name, i, one.member.look(), one.is_drained) for i, one in enumerate(there)]

    async def tell(self, replica_ids: Sequence[str], state: FleetState) -> list[str]:
        there = [self.replicas[name] for name in replica_ids if name not in self.deaf]
        return [one.name for one in there if not one.is_gone and one.member.tell(state)]

    async def control(
        self, arguments: Mapping[str, Mapping[str, Any]], name: str, timeout_s: float
    ) -> list[ReplicaAnswer]:
        asked = [(self.replicas[who], self.replicas[who].call(name, own)) for who, own in arguments.items()]
        return await asyncio.gather(*(self._answer(one, call) for one, call in asked))

    async def bring_to(self, replica_ids: Sequence[str], state: FleetState, timeout_s: float) -> list[ReplicaAnswer]:
        asked = [self.replicas[name] for name in replica_ids]
        return await asyncio.gather(*(self._answer(one, one.member.bring_to(state)) for one in asked))

    async def leave(self, replica_ids: Sequence[str]) -> None:
        for name in replica_ids:
            self.left.append(name)
            self.replicas[name].is_gone = True

    async def drain(self, replica_id: str, is_drained: bool, move: bool) -> bool:
        self.replicas[replica_id].is_drained = is_drained
        return True

    async def _answer(self, one: FakeReplica, call: Any) -> ReplicaAnswer:
        try:
            result = await call
            if one.is_gone:
                raise EngineDeadError("it did not answer")
            return ReplicaAnswer(one.name, result)
        except MantaError as error:
            return ReplicaAnswer(one.name, error=error)
