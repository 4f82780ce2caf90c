"""The Admin deployment: the operator's HTTP listener over all replicas of all models. There is one, on Ray's head.

No request passes here, and no route of HAProxy leads here; ingresses have adapters loaded that they have found. Without
a port it has no listener. When it dies Serve starts another one, which learns from the
replicas what they were told; until then they serve as they are, and one that starts asks the others.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.api.admin.app import create_admin_app
from app.api.admin.fleet import TIMEOUT_S
from app.api.engine_client import ReplicaAnswer
from app.api.http.auth import ApiKeys
from app.checkpoints.adapters.adapter_files import within
from app.config.serve import ServeConfig
from app.deployments.admin.engine_port import EnginePort
from app.deployments.admin.fleet import ModelFleet
from app.deployments.admin.fleet_state import FleetState
from app.deployments.admin.listener import Listener
from app.deployments.process.cluster_secret import load_block_hash_key
from app.deployments.process.serve_logs import log_to_serve_files
from app.deployments.process.start_errors import logs_start_error
from app.errors import EngineDeadError, InvalidRequestError, MantaError, ModelNotFoundError
from app.telemetry.tenant_tokens import TenantLabels

LOOK_AFTER_S = 2.0

logger = logging.getLogger("manta.admin")


@dataclass(frozen=True, slots=True)
class _Model:
    name: str


class Fleets:
    """See app.api.admin.fleet.Fleet."""

    def __init__(self, config: ServeConfig, fleets: Mapping[str, ModelFleet]) -> None:
        names = {name: model.name for model in config.models for name in (model.name, *model.aliases)}
        self._models = {name: _Model(own) for name, own in names.items()}
        self._fleets = fleets
        self._running: set[asyncio.Task[Any]] = set()

    @property
    def models(self) -> Mapping[str, _Model]:
        """See Fleet."""
        return self._models

    def of(self, model: str) -> ModelFleet:
        """One model's; ModelNotFoundError."""
        if model not in self._models:
            raise ModelNotFoundError(f"no model is served under the name {model!r}", param="model")
        return self._fleets[self._models[model].name]

    async def control(self, model: str, name: str, arguments: dict[str, Any], timeout_s: float) -> list[ReplicaAnswer]:
        """See Fleet. A client that leaves does not end it half-way."""
        task = asyncio.create_task(self.of(model).control(name, arguments, timeout_s))
        self._running.add(task)
        task.add_done_callback(self._log_failure)
        return await asyncio.shield(task)

    def _log_failure(self, task: asyncio.Task[Any]) -> None:
        self._running.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None and not isinstance(error, MantaError):
            logger.error("a control call failed", exc_info=error)

    async def describe(self) -> list[dict[str, Any]]:
        """See Fleet."""
        return await asyncio.gather(*(fleet.describe() for fleet in self._fleets.values()))

    async def drain(self, replica_id: str, is_drained: bool, move: bool) -> None:
        """See Fleet."""
        for fleet in self._fleets.values():
            if await fleet.drain(replica_id, is_drained, move):
                return
        raise InvalidRequestError(f"no replica {replica_id[:256]!r} runs: /models lists them", param="replica_id")


class Admin:
    """`engines` are Serve handles, by model."""

    @logs_start_error("the operator's listener")
    async def __init__(self, config: ServeConfig, engines: Mapping[str, Any]) -> None:  # type: ignore[misc]  # as Serve
        log_to_serve_files()
        idle_s = config.admin.transfer_idle_s
        fleets = {name: ModelFleet(name, EnginePort(handle), idle_s) for name, handle in engines.items()}
        self._fleets = Fleets(config, fleets)
        self._adapter_roots = {
            model.name: Path(model.adapter_directory) for model in config.models if model.adapter_directory is not None
        }
        self._listener = None if config.admin.port is None else await self._listen(config, config.admin.port)
        self._task = asyncio.create_task(self._look_after(list(fleets.values())))

    async def _listen(self, config: ServeConfig, port: int) -> Listener:
        keys = await asyncio.to_thread(ApiKeys.of_operators, config.admin)
        labels = TenantLabels(await asyncio.to_thread(load_block_hash_key))
        app = await asyncio.to_thread(create_admin_app, self._fleets, config, keys, labels)
        listener = Listener(app, config.admin.host, port)
        await listener.start()
        logger.info("operators: http://%s:%d, %d keys", config.admin.host, port, keys.num_keys)
        return listener

    async def fleet_state(self, model: str) -> FleetState:
        """Returns what a replica that starts is to become."""
        return await self._fleets.of(model).known_state()

    async def load_adapter(self, model: str, name: str, path: str) -> MantaError | None:
        """Have all replicas of a model serve an adapter that an ingress has found under `adapter_directory`, or none;
        returns the error."""
        try:
            own = within(path, [self._adapter_roots[model]])
            arguments = {"name": name, "path": str(own), "in_place": False}
            answers = await self._fleets.control(model, "load_adapter", arguments, TIMEOUT_S)
        except MantaError as error:
            return error
        return next((one.error for one in answers if one.error is not None), None)

    async def check_health(self) -> None:
        """Serve's health check."""
        is_serving = self._listener is None or self._listener.is_serving
        if not is_serving or self._task.done():
            raise EngineDeadError("the operator's listener has ended")

    async def __del__(self) -> None:
        """Serve calls it once the replica is drained."""
        if hasattr(self, "_task"):
            self._task.cancel()
            if self._listener is not None:
                await self._listener.close()

    async def _look_after(self, fleets: list[ModelFleet]) -> None:
        await asyncio.gather(*(fleet.recover() for fleet in fleets))
        while True:
            await asyncio.sleep(LOOK_AFTER_S)
            for fleet in fleets:
                try:
                    await fleet.look_after()
                except Exception:
                    logger.exception("%s: looking after its replicas failed", fleet.model)
