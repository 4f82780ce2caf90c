"""POST /v1/chat/completions/render and /v1/completions/render: a request as /inference/v1/generate takes it.

Trainers and routers that hold token ids ask for what a request would run as, and send that, here or elsewhere.
"""

from __future__ import annotations

import uuid
from typing import Any

from fastapi import APIRouter, Request

from app.api.chat.chat_request import ChatRequest
from app.api.chat.conversation import prepare
from app.api.chat.generation import Generation
from app.api.chat.generation_body import GenerationBody
from app.api.endpoint import Endpoint
from app.api.engine_client import EngineClient
from app.api.generation.render import engine_requests, find_model, sampling_params
from app.api.http.body import describe_body, read_body
from app.api.http.json_response import JSONResponse
from app.api.openai.completions import CompletionRequest, read_prompts
from app.config.limits import RequestLimits
from app.errors import UnsupportedError
from app.records.request import ANYWHERE


def render_routes(client: EngineClient, limits: RequestLimits) -> APIRouter:
    """The endpoints over `client`."""
    router = APIRouter(tags=["tokens"])

    @router.post("/v1/chat/completions/render", openapi_extra=describe_body(ChatRequest))
    async def render_chat_completion(request: Request) -> JSONResponse:
        """The body with which /inference/v1/generate answers the same conversation."""
        body = await read_body(request, ChatRequest)
        model = find_model(client, body.model)
        prepared = await prepare(limits, request, body, model)
        return JSONResponse(_rendered(body, limits, prepared.generation)[0])

    @router.post("/v1/completions/render", openapi_extra=describe_body(CompletionRequest))
    async def render_completion(request: Request) -> JSONResponse:
        """The bodies with which /inference/v1/generate continues the same prompts."""
        body = await read_body(request, CompletionRequest)
        model = find_model(client, body.model)
        prompts = await read_prompts(request, body, model, limits)
        return JSONResponse(_rendered(body, limits, Generation.of(body, model, prompts)))

    return router


def _rendered(body: GenerationBody, limits: RequestLimits, generation: Generation) -> list[dict[str, Any]]:
    """The body for each prompt: its token ids, and each parameter that is not at its default. Errors are those with
    which the request itself would be refused."""
    if body.use_beam_search:
        raise UnsupportedError("a search is no request of token ids", param="use_beam_search")
    model, prompts = generation.model, generation.prompts
    if any(prompt.asks for prompt in prompts):
        raise UnsupportedError("a request of token ids brings no pictures and no sounds", param="messages")
    params = sampling_params(generation.fields, model, body.model_fields_set)
    names, start = generation.names, generation.start
    engine_requests(model, limits, prompts, params, ANYWHERE, request_id="", names=names, start=start)
    shared = {
        "model": body.model or model.name,
        "sampling_params": params.model_dump(mode="json", by_alias=True, exclude_defaults=True),
        "stream": body.stream,
        **{name: value for name, value in body.placement_fields().items() if value},
    }
    given = body.request_id
    ids = [given if given and i == 0 else f"render-{uuid.uuid4().hex}" for i in range(len(prompts))]
    return [
        {"request_id": own, "token_ids": prompt.token_ids, **shared} for own, prompt in zip(ids, prompts, strict=True)
    ]


ENDPOINT = Endpoint(lambda api: render_routes(api.client, api.limits))
