"""POST /debug/route: where a prompt or a conversation would go, and why. Open only with `ingress.admin`."""

from __future__ import annotations

from typing import Any, Protocol

from fastapi import APIRouter, Request
from pydantic import Field

from app.api.engine_client import EngineClient
from app.api.generation.placement import cache_root
from app.api.generation.render import find_model
from app.api.http.body import describe_body, read_body
from app.api.http.json_response import JSONResponse
from app.api.http.work_pool import work_of
from app.api.openai.tokenize import TokenizeRequest, prompt_token_ids
from app.bounds import Count
from app.config.limits import RequestLimits
from app.errors import InvalidRequestError


class RouteRequest(TokenizeRequest):
    """Body of POST /debug/route: that of /tokenize, and what else decides where a request goes."""

    max_tokens: Count = Field(256, ge=1, description="Most tokens that the request would generate.")
    cache_salt: str | None = Field(None, min_length=1, description="Only requests of equal salt share prefix blocks.")
    session: str = Field("", max_length=256, description="The request's session, for policies that keep it together.")


class RouteExplainer(EngineClient, Protocol):
    """An EngineClient that can say where it would send a prompt."""

    async def explain_route(
        self, model: str, prompt_token_ids: list[int], root: bytes, max_tokens: int, session: str
    ) -> dict[str, Any]:
        """The decision and what each replica has and would cost, as JSON; nothing is counted.

        EngineDeadError when the Router does not answer.
        """
        ...


def debug_routes(client: RouteExplainer, limits: RequestLimits) -> APIRouter:
    """The administrator's routes."""
    router = APIRouter(tags=["debug"])

    @router.post("/debug/route", openapi_extra=describe_body(RouteRequest))
    async def route(request: Request) -> JSONResponse:
        """Explains what each replica has cached of a prompt and what the request would cost there."""
        body = await read_body(request, RouteRequest)
        model = find_model(client, body.model)
        token_ids = await prompt_token_ids(work_of(request), body, model, limits)
        if not token_ids:
            raise InvalidRequestError("prompt: must hold at least one token", param="prompt")
        root = cache_root(request.state.tenant, body.cache_salt)
        root = root if model.adapter is None else model.adapter.cache_root(root)
        return JSONResponse(
            await client.explain_route(model.engine_name, token_ids, root, body.max_tokens, body.session)
        )

    return router
