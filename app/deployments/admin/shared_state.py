"""Lets a replica that starts learn what the fleet is."""

from __future__ import annotations

import asyncio
from typing import Any

from ray import serve

from app.deployments.admin.fleet_state import FleetState, latest
from app.deployments.channel.serve_port import LOST, broadcast, call

ADMIN = "Admin"  # the name of the deployment
ADMIN_TIMEOUT_S = 5.0
PEERS_TIMEOUT_S = 2.0
TRIES = 5  # while some may know and do not answer: a replica that hangs must not hold up all others for good
RETRY_S = 1.0


class SharedState:
    """Asked by the replicas of one model. The Admin knows; while it is not there, the other replicas do."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._admin: Any = None
        self._peers: Any = None

    async def ask(self) -> FleetState:
        """Returns what the fleet is; its configuration, where nobody knows better."""
        if self._admin is None:
            self._find()
        for _ in range(TRIES):
            try:
                state: FleetState = await call(self._admin, self._model, timeout_s=ADMIN_TIMEOUT_S)
                return state
            except LOST:
                pass
            try:
                told = await broadcast(self._peers, "fleet_state", timeout_s=PEERS_TIMEOUT_S)
            except LOST as error:
                told = [error]
            known = latest([one for one in told if isinstance(one, FleetState)])
            if known is not None or not any(isinstance(one, BaseException) for one in told):
                return known or FleetState()
            await asyncio.sleep(RETRY_S)
        return FleetState()

    def _find(self) -> None:
        context = serve.get_replica_context()
        self._peers = serve.get_deployment_handle(context.deployment, context.app_name)
        self._admin = serve.get_deployment_handle(ADMIN, context.app_name).options(method_name="fleet_state")
