"""The Admin's way to the running replicas of one model, over Serve's handle."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from app.api.engine_client import ReplicaAnswer
from app.deployments.admin.fleet_state import FleetState, MemberReport
from app.deployments.channel.serve_port import LOST, broadcast, call
from app.errors import EngineDeadError

TIMEOUT_S = 5.0  # for what takes a replica no time


class EnginePort:
    """See FleetPort."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    async def members(self) -> list[MemberReport]:
        """See FleetPort."""
        try:
            answers = await broadcast(self._handle, "fleet_member", timeout_s=TIMEOUT_S)
        except LOST:
            return []
        return [answer for answer in answers if isinstance(answer, MemberReport)]

    async def tell(self, replica_ids: Sequence[str], state: FleetState) -> list[str]:
        """See FleetPort."""
        told = await asyncio.gather(*(self._ask(name, "tell_fleet_state", state) for name in replica_ids))
        return [name for name, joined in zip(replica_ids, told, strict=True) if joined is True]

    async def control(
        self, arguments: Mapping[str, Mapping[str, Any]], name: str, timeout_s: float
    ) -> list[ReplicaAnswer]:
        """See FleetPort."""
        calls = [
            self._answer(replica, "run_control", name, dict(own), timeout_s, limit_s=timeout_s)
            for replica, own in arguments.items()
        ]
        return await asyncio.gather(*calls)

    async def bring_to(self, replica_ids: Sequence[str], state: FleetState, timeout_s: float) -> list[ReplicaAnswer]:
        """See FleetPort."""
        calls = [self._answer(name, "bring_to", state, timeout_s, limit_s=timeout_s) for name in replica_ids]
        return await asyncio.gather(*calls)

    async def leave(self, replica_ids: Sequence[str]) -> None:
        """See FleetPort."""
        await asyncio.gather(*(self._ask(name, "leave") for name in replica_ids))

    async def drain(self, replica_id: str, is_drained: bool, move: bool) -> bool:
        """See FleetPort."""
        return await self._ask(replica_id, "drain", is_drained, move) is True

    async def _ask(self, replica_id: str, method: str, *arguments: Any, limit_s: float = 0.0) -> Any:
        """Asks one replica, and returns what it says, or the error."""
        handle = self._handle.options(method_name=method)
        try:
            return await call(handle, *arguments, target=replica_id, timeout_s=limit_s + TIMEOUT_S)
        except LOST as error:
            return error

    async def _answer(self, replica_id: str, method: str, *arguments: Any, limit_s: float) -> ReplicaAnswer:
        answer = await self._ask(replica_id, method, *arguments, limit_s=limit_s)
        if isinstance(answer, ReplicaAnswer):
            return answer
        error = EngineDeadError(f"it did not answer ({type(answer).__name__})")
        return ReplicaAnswer(replica_id, error=error)
