"""New weights for all replicas of a model: from a directory, or from another process that broadcasts them."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Request
from pydantic import Field

from app.api.admin.fleet import MAX_TIMEOUT_S, TIMEOUT_S, Fleet, called
from app.api.generation.render import find_model
from app.api.http.body import describe_body, read_body, read_optional_body
from app.api.http.json_response import JSONResponse
from app.api.http.strict_models import StrictModel
from app.engine.control.transfer import MAX_TENSORS, Names, Shape
from app.errors import InvalidRequestError

MAX_PATH_CHARS = 4096
Mode = Literal["wait", "abort", "keep"]
Timeout = Annotated[float, Field(gt=0, le=MAX_TIMEOUT_S)]
MODEL = "Whose replicas are meant; the first model when not given."


class UpdateInfo(StrictModel):
    """Tensors that the sender broadcasts."""

    names: Names = Field(description="Their names in the checkpoint.")
    dtype_names: Names = Field(description="Their types, as torch calls them.")
    shapes: list[Shape] = Field(max_length=MAX_TENSORS, description="Their shapes.")


class UpdateRequest(StrictModel):
    """Body of POST /update_weights: a directory, or what a sender sends."""

    model: str | None = Field(None, description=MODEL)
    path: str | None = Field(
        None, min_length=1, max_length=MAX_PATH_CHARS, description="A directory that all nodes have."
    )
    mode: Mode = Field("wait", description="What becomes of the requests that run.")
    update_info: UpdateInfo | None = Field(None, description="Instead of `path`, within an update that was started.")
    timeout: Timeout = Field(TIMEOUT_S, description="Seconds that each replica has for each part.")


class ReloadRequest(StrictModel):
    """Body of POST /reload_weights and /start_weight_update."""

    model: str | None = Field(None, description=MODEL)
    mode: Mode = Field("wait", description="What becomes of the requests that run.")
    timeout: Timeout = Field(TIMEOUT_S, description="Seconds that each replica has for each part.")


class InitInfo(StrictModel):
    """Says where the sender listens."""

    master_address: str = Field(min_length=1, max_length=255, description="Its address.")
    master_port: int = Field(ge=1, le=65535, description="Its port.")
    rank_offset: int = Field(1, ge=1, le=1 << 16, description="The first worker's rank; the sender has 0.")
    world_size: int = Field(ge=2, le=1 << 16, description="Workers of all replicas, and the sender.")


class InitRequest(StrictModel):
    """Body of POST /init_weight_transfer_engine."""

    model: str | None = Field(None, description=MODEL)
    init_info: InitInfo = Field(description="Where the sender listens.")
    timeout: Timeout = Field(TIMEOUT_S, description="Seconds that each replica has.")


class FinishRequest(StrictModel):
    """Body of POST /finish_weight_update."""

    model: str | None = Field(None, description=MODEL)
    version: str = Field("", max_length=256, description="Says what came; enters the revision.")
    whole: bool = Field(False, description="Refuse less than all weights of the model.")
    timeout: Timeout = Field(TIMEOUT_S, description="Seconds that each replica has.")


def weight_routes(fleet: Fleet) -> APIRouter:
    """POST /update_weights, /reload_weights, and the three parts of a transfer from another process."""
    router = APIRouter(tags=["weights"])

    async def call(model: str | None, name: str, timeout_s: float, **arguments: object) -> JSONResponse:
        return await called(fleet, find_model(fleet, model).name, name, arguments, timeout_s)

    @router.post("/update_weights", openapi_extra=describe_body(UpdateRequest))
    async def update_weights(request: Request) -> JSONResponse:
        """New weights from a directory, for all replicas before any answers with them; or tensors that are sent now."""
        body = await read_body(request, UpdateRequest)
        if (body.path is None) == (body.update_info is None):
            raise InvalidRequestError("path: give either `path` or `update_info`", param="path")
        if body.update_info is not None:
            return await call(body.model, "receive_weights", body.timeout, **body.update_info.model_dump())
        return await call(body.model, "update_weights", body.timeout, path=body.path, mode=body.mode)

    @router.post("/reload_weights", openapi_extra=describe_body(ReloadRequest))
    async def reload_weights(request: Request) -> JSONResponse:
        """The weights of the model's own directory again, for all replicas before any answers with them."""
        body = await read_optional_body(request, ReloadRequest)
        return await call(body.model, "reload_weights", body.timeout, mode=body.mode)

    @router.post("/init_weight_transfer_engine", openapi_extra=describe_body(InitRequest))
    async def init_weight_transfer_engine(request: Request) -> JSONResponse:
        """Let all workers join a sender's group, each replica's ranks behind those of the one before."""
        body = await read_body(request, InitRequest)
        return await call(body.model, "init_weight_transfer_engine", body.timeout, **body.init_info.model_dump())

    @router.post("/start_weight_update", openapi_extra=describe_body(ReloadRequest))
    async def start_weight_update(request: Request) -> JSONResponse:
        """Compute nothing more, until /finish_weight_update."""
        body = await read_optional_body(request, ReloadRequest)
        return await call(body.model, "start_weight_update", body.timeout, mode=body.mode)

    @router.post("/finish_weight_update", openapi_extra=describe_body(FinishRequest))
    async def finish_weight_update(request: Request) -> JSONResponse:
        """Go on with the weights that came."""
        body = await read_optional_body(request, FinishRequest)
        return await call(body.model, "finish_weight_update", body.timeout, version=body.version, whole=body.whole)

    return router
