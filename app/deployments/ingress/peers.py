"""The other ingress replicas of the application, as one of them reaches them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from ray import serve

from app.deployments.channel.serve_port import LOST, broadcast
from app.deployments.ingress.continuation import QUARANTINE_S, Quarantine

TIMEOUT_S = 2.0

Refused = Mapping[str, Mapping[bytes, float]]  # by model: seconds by digest


class Peers:
    """All ingress replicas, the asker among them."""

    def __init__(self) -> None:
        self._handle: Any = None

    def handle(self) -> Any:
        """Serve's; made late, as Serve knows no application before its replicas run."""
        if self._handle is None:
            context = serve.get_replica_context()
            self._handle = serve.get_deployment_handle(context.deployment, context.app_name)
        return self._handle

    async def ask(self, method: str, *arguments: Any) -> list[Any]:
        """Returns the answers of those that answer in time; never raises."""
        try:
            answers = await broadcast(self.handle(), method, *arguments, timeout_s=TIMEOUT_S)
        except LOST:
            return []
        return [answer for answer in answers if not isinstance(answer, BaseException)]


class SharedQuarantines:
    """Each model's quarantine here, kept equal to those of the other ingresses: they tell each other what they add,
    and a new one asks the others."""

    def __init__(self, peers: Peers, models: Mapping[str, Any]) -> None:
        self._peers = peers
        self._tasks: set[asyncio.Task[Any]] = set()
        self.of = {model: Quarantine(self._teller(model)) for model in models}

    def _teller(self, model: str) -> Any:
        return lambda digest: self._run(self._peers.ask("refuse", {model: {digest: QUARANTINE_S}}))

    def _run(self, call: Any) -> None:
        task = asyncio.create_task(call)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def refuse(self, refused: Refused) -> None:
        """Another ingress has told."""
        for model, seconds in refused.items():
            if model in self.of:
                self.of[model].refuse(seconds)

    def refused(self) -> Refused:
        """Returns what another ingress is told that asks."""
        return {model: quarantine.refused() for model, quarantine in self.of.items()}

    def learn(self) -> None:
        """Ask the others, in the background."""
        self._run(self._learn())

    async def _learn(self) -> None:
        for refused in await self._peers.ask("refused"):
            self.refuse(refused)
