"""POST /v1/chat/completions."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from app.api.chat.chat_request import ChatRequest
from app.api.chat.conversation import Conversation, open_conversation
from app.api.chat.envelope import ResponseEnvelope
from app.api.chat.generation import response_headers
from app.api.endpoint import Endpoint
from app.api.engine_client import EngineClient
from app.api.generation.events import collect
from app.api.generation.render import find_model
from app.api.generation.sse import EventStreamResponse
from app.api.http.body import describe_body, read_body
from app.api.http.json_response import json_response
from app.api.http.work_pool import work_of
from app.api.openai.chat_answer import chat_answer, read_choices
from app.api.openai.chat_store import ChatKeeper, ChatStore
from app.api.openai.chunks import ChatChunks, OutputOptions
from app.api.openai.kept_chunks import KeptChunks
from app.api.openai.logprobs import writing_cost_s
from app.config.limits import RequestLimits


def chat_routes(client: EngineClient, limits: RequestLimits, kept: ChatStore) -> APIRouter:
    """The chat endpoint over `client`; what clients want to keep is kept in `kept`."""
    router = APIRouter(tags=["openai"])

    @router.post("/v1/chat/completions", openapi_extra=describe_body(ChatRequest))
    async def create_chat_completion(request: Request) -> Response:
        """Answer a conversation; `stream` makes it server-sent events, `store` keeps the answer."""
        body = await read_body(request, ChatRequest)
        model = find_model(client, body.model)
        envelope = ResponseEnvelope.of("chatcmpl", model, body.model)
        conversation = await open_conversation(client, limits, request, body, model, envelope)
        keeper = kept.keeper(request, body, conversation) if body.store else None
        if body.stream:
            return EventStreamResponse(conversation.stream, _chunks(conversation, body, keeper))
        return await _whole(request, conversation, body, keeper)

    return router


def _chunks(conversation: Conversation, body: ChatRequest, keeper: ChatKeeper | None) -> ChatChunks:
    options = OutputOptions(
        body.include_usage,
        body.continuous_usage,
        body.logprobs,
        body.return_token_ids,
        body.include_reasoning,
        body.return_tokens_as_token_ids,
        body.echoed_text(),
    )
    if keeper is not None:
        return KeptChunks(conversation, options, keeper, body.calls_finish_reason())
    return ChatChunks(conversation, options, body.calls_finish_reason())


async def _whole(
    request: Request, conversation: Conversation, body: ChatRequest, keeper: ChatKeeper | None
) -> Response:
    collected = await collect(conversation.stream)
    work, cost_s = work_of(request), writing_cost_s(collected)

    def describe() -> dict[str, Any]:
        return chat_answer(conversation, body, read_choices(collected, conversation))

    def answer() -> Response:
        return json_response(describe(), response_headers(conversation.stream))

    if keeper is None:
        return await work.run(cost_s, answer)
    described = await work.run(cost_s, describe)
    described["store"] = await keeper.keep(described, cost_s)
    return await work.run(cost_s, json_response, described, response_headers(conversation.stream))


ENDPOINT = Endpoint(
    lambda api: chat_routes(api.client, api.limits, ChatStore.of(api)),
    (ChatRequest,),
    generating=("/v1/chat/completions",),
)
