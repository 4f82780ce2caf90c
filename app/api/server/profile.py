"""POST /start_profile, /stop_profile, /memory_snapshot: what the replicas of a model compute and hold, as files.

Under vLLM's names. Open only with `ingress.admin`, and only where `ingress.profile_directory` says where files may go;
the server chooses their names. A profile ends by itself after so many steps or seconds.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any, Protocol

from fastapi import APIRouter, Request
from pydantic import Field

from app.api.engine_client import Named, ReplicaAnswer
from app.api.generation.render import find_model
from app.api.http.body import read_optional_body
from app.api.http.json_response import JSONResponse
from app.api.http.origin import check_origin
from app.api.http.strict_models import StrictModel
from app.config.ingress import IngressConfig
from app.errors import UnsupportedError

logger = logging.getLogger("manta.api")

MAX_STEPS = 1000
MAX_S = 120.0
BEGIN_S = 1.0  # what is refused, is refused by then
WRITE_S = 60.0  # a trace may take so long to be written


class ProfileRequest(StrictModel):
    """Body of POST /start_profile; an empty one takes the defaults."""

    model: str | None = Field(None, description="Whose replicas record; the first model when not given.")
    num_steps: int = Field(50, ge=1, le=MAX_STEPS, description="Steps of the engine after which the recording ends.")
    max_s: float = Field(30.0, gt=0, le=MAX_S, description="Seconds after which it ends in any case.")


class ModelName(StrictModel):
    """Body of POST /stop_profile and /memory_snapshot; an empty one takes the default."""

    model: str | None = Field(None, description="Whose replicas are meant; the first model when not given.")


class Controlled(Protocol):
    """The replicas of all models, which take control calls (app/engine/control)."""

    @property
    def models(self) -> Mapping[str, Named]:
        """The models by name and by alias, the default first."""

    async def control(self, model: str, name: str, arguments: dict[str, Any], timeout_s: float) -> list[ReplicaAnswer]:
        """The answers of every replica, errors as values."""
        ...


def profile_routes(client: Controlled, ingress: IngressConfig) -> APIRouter:
    """The administrator's routes."""
    router = APIRouter(tags=["debug"])
    running: set[asyncio.Task[list[ReplicaAnswer]]] = set()

    def directory() -> str:
        if ingress.profile_directory is None:
            raise UnsupportedError("this server records no profiles: set ingress.profile_directory")
        return ingress.profile_directory

    async def asked(request: Request, kind: type[ProfileRequest] | type[ModelName]) -> Any:
        check_origin(request, ingress.cors_origins)
        return await read_optional_body(request, kind)

    @router.post("/start_profile")
    async def start_profile(request: Request) -> JSONResponse:
        """Record what all ranks of all replicas of a model compute; at once what was refused, or has ended already."""
        body, where = await asked(request, ProfileRequest), directory()
        name = find_model(client, body.model).name
        options = {"directory": where, "num_steps": body.num_steps, "max_s": body.max_s}
        task = asyncio.create_task(client.control(name, "record_profile", options, body.max_s + WRITE_S))
        running.add(task)
        task.add_done_callback(running.discard)
        task.add_done_callback(_note_failure)
        done, _ = await asyncio.wait({task}, timeout=BEGIN_S)
        if done:
            return _answers(name, task.result())
        return JSONResponse({"model": name, "status": "recording", "num_steps": body.num_steps, "max_s": body.max_s})

    @router.post("/stop_profile")
    async def stop_profile(request: Request) -> JSONResponse:
        """End the recording, or hear of one that has ended by itself: the file of each rank, on its own node."""
        body = await asked(request, ModelName)
        directory()
        name = find_model(client, body.model).name
        return _answers(name, await client.control(name, "stop_profile", {}, WRITE_S))

    @router.post("/memory_snapshot")
    async def memory_snapshot(request: Request) -> JSONResponse:
        """Write what the device memory of each rank holds; a 400 where there is no CUDA device."""
        body, where = await asked(request, ModelName), directory()
        name = find_model(client, body.model).name
        return _answers(name, await client.control(name, "memory_snapshot", {"directory": where}, WRITE_S))

    return router


def _note_failure(task: asyncio.Task[list[ReplicaAnswer]]) -> None:
    """Whoever asked for the recording has had its answer by then, or has it from the task."""
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.warning("the recording of a profile failed: %s", error)


def _answers(model: str, answers: list[ReplicaAnswer]) -> JSONResponse:
    """Answers with what each replica says; the first error where all say one."""
    errors = [answer.error for answer in answers if answer.error is not None]
    if errors and len(errors) == len(answers):
        raise errors[0]
    replicas = [
        {"replica_id": answer.replica_id, "files": answer.result or [], "error": answer.error and answer.error.message}
        for answer in answers
    ]
    return JSONResponse({"model": model, "status": "done", "replicas": replicas})
