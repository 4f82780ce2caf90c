"""POST /v1/chat/completions."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from app.api.body import describe_body, read_body
from app.api.engine_client import EngineClient, ServedModel
from app.api.events import Collected, EventStream, collect
from app.api.openai.chunks import ChatChunks, StreamWishes, call_fields, chat_finish_reason
from app.api.openai.conversation import open_conversation
from app.api.openai.generation import response_headers
from app.api.openai.head import ResponseHead, usage
from app.api.openai.logprobs import chat_logprobs, prompt_logprobs
from app.api.openai.protocol import ChatRequest
from app.api.parsers.base import ToolParser
from app.api.render import find_model
from app.api.sse import EventStreamResponse
from app.config import RequestLimits


def chat_routes(client: EngineClient, limits: RequestLimits) -> APIRouter:
    """The chat endpoint over `client`."""
    router = APIRouter(tags=["openai"])

    @router.post("/v1/chat/completions", openapi_extra=describe_body(ChatRequest))
    async def create_chat_completion(request: Request) -> Response:
        """Answer a conversation; `stream` makes it server-sent events."""
        body = await read_body(request, ChatRequest)
        model = find_model(client, body.model)
        head = ResponseHead.of("chatcmpl", model, body.model)
        conversation = await open_conversation(client, limits, request, body, model, head)
        stream, parsers, max_calls = conversation.stream, conversation.parsers, conversation.max_calls
        if body.stream:
            wishes = StreamWishes(body.include_usage, body.continuous_usage, body.logprobs, body.return_token_ids)
            form = ChatChunks(head, stream.choices, model.tokenizer, wishes, parsers, max_calls)
            return EventStreamResponse(stream, form)
        collected = await collect(stream)
        choices = [_choice(entry, parsers, max_calls, body, model) for entry in collected]
        answer = head.fields("chat.completion") | {"choices": choices, "usage": usage(stream.choices)}
        return JSONResponse(answer | _prompt_fields(stream, collected, body, model), headers=response_headers(stream))

    return router


def _choice(
    entry: Collected, parsers: list[ToolParser], max_calls: int | None, body: ChatRequest, model: ServedModel
) -> dict[str, Any]:
    output = entry.output
    message: dict[str, Any] = {"role": "assistant", "content": output.text, "refusal": None}
    calls = []
    if parsers:
        first, rest = parsers[output.index].push(output.text), parsers[output.index].flush()
        calls = (first.calls + rest.calls)[:max_calls]
        message["content"] = first.content + rest.content
    if calls:
        message["content"] = message["content"] or None
        message["tool_calls"] = [call_fields(call) for call in calls]
    choice: dict[str, Any] = {
        "index": output.index,
        "message": message,
        "logprobs": chat_logprobs(output.logprobs or (), model.tokenizer) if body.logprobs else None,
        "finish_reason": chat_finish_reason(output.finish_reason, len(calls)),
        "stop_reason": output.stop_reason,
    }
    return choice | ({"token_ids": output.token_ids} if body.return_token_ids else {})


def _prompt_fields(
    stream: EventStream, collected: list[Collected], body: ChatRequest, model: ServedModel
) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    entries = collected[0].prompt_logprobs
    if body.prompt_logprobs is not None and entries is not None:
        fields["prompt_logprobs"] = prompt_logprobs(entries, model.tokenizer)
    if body.return_token_ids:
        fields["prompt_token_ids"] = stream.choices[0].request.prompt_token_ids
    return fields
