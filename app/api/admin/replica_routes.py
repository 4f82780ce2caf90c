"""Routes that list what there is, take one replica out of service and back, and make control calls by name."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from pydantic import Field

from app.api.admin.fleet import MAX_TIMEOUT_S, TIMEOUT_S, Fleet, called
from app.api.generation.render import find_model
from app.api.http.body import describe_body, read_body
from app.api.http.json_response import JSONResponse
from app.api.http.query import choice_param, no_other_params
from app.api.http.strict_models import StrictModel
from app.bounds import JsonObject
from app.engine.control import REMOTE
from app.errors import InvalidRequestError


class RpcRequest(StrictModel):
    """Body of POST /collective_rpc."""

    model: str | None = Field(None, description="Whose replicas are called; the first model when not given.")
    method: str = Field(max_length=64, description="A control call of docs/admin.md.")
    args: list[Any] = Field(default_factory=list, max_length=0, description="Refused: name arguments in `kwargs`.")
    kwargs: JsonObject = Field(default_factory=dict, description="Its arguments.")
    timeout: float = Field(TIMEOUT_S, gt=0, le=MAX_TIMEOUT_S, description="Seconds that each replica has.")


def replica_routes(fleet: Fleet) -> APIRouter:
    """GET /models; POST /replicas/{replica_id}/drain and /resume, /collective_rpc."""
    router = APIRouter(tags=["replicas"])

    @router.get("/models")
    async def models(request: Request) -> JSONResponse:
        """Each model: the revision of its weights, what the fleet is to be, and what each replica is."""
        no_other_params(request)
        return JSONResponse({"models": await fleet.describe()})

    @router.post("/replicas/{replica_id}/drain")
    async def drain(request: Request, replica_id: str) -> JSONResponse:
        """Send one replica nothing new; with `move=true` what runs there goes on at the others at once."""
        no_other_params(request, "move")
        await fleet.drain(replica_id, True, choice_param(request, "move", ("false", "true")) == "true")
        return JSONResponse({"replica_id": replica_id, "drained": True})

    @router.post("/replicas/{replica_id}/resume")
    async def resume(request: Request, replica_id: str) -> JSONResponse:
        """Send it requests again."""
        no_other_params(request)
        await fleet.drain(replica_id, False, False)
        return JSONResponse({"replica_id": replica_id, "drained": False})

    @router.post("/collective_rpc", openapi_extra=describe_body(RpcRequest))
    async def collective_rpc(request: Request) -> JSONResponse:
        """A control call by name, of a table; no free name reaches an engine."""
        body = await read_body(request, RpcRequest)
        if body.method not in REMOTE:
            raise InvalidRequestError(f"method: no such call; known: {', '.join(REMOTE)}", param="method")
        return await called(fleet, find_model(fleet, body.model).name, body.method, body.kwargs, body.timeout)

    return router
