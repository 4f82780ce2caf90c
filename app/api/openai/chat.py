"""POST /v1/chat/completions."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from app.api.body import describe_body, read_body
from app.api.chat.chat_request import ChatRequest
from app.api.chat.conversation import Conversation, open_conversation
from app.api.chat.envelope import ResponseEnvelope, usage
from app.api.chat.generation import response_headers
from app.api.endpoint import Endpoint
from app.api.engine_client import EngineClient, ServedModel
from app.api.events import Collected, EventStream, collect
from app.api.json_response import json_response
from app.api.openai.chunks import ChatChunks, OutputOptions, call_fields, chat_finish_reason, reasoning_fields
from app.api.openai.logprobs import chat_token_fields, prompt_logprobs, token_names, writing_cost_s
from app.api.parsers.base import ParsedAnswer
from app.api.render import find_model
from app.api.sse import EventStreamResponse
from app.api.work_pool import work_of
from app.config import RequestLimits
from app.engine.outputs import CompletionOutput


def chat_routes(client: EngineClient, limits: RequestLimits) -> APIRouter:
    """The chat endpoint over `client`."""
    router = APIRouter(tags=["openai"])

    @router.post("/v1/chat/completions", openapi_extra=describe_body(ChatRequest))
    async def create_chat_completion(request: Request) -> Response:
        """Answer a conversation; `stream` makes it server-sent events."""
        body = await read_body(request, ChatRequest)
        model = find_model(client, body.model)
        envelope = ResponseEnvelope.of("chatcmpl", model, body.model)
        conversation = await open_conversation(client, limits, request, body, model, envelope)
        stream = conversation.stream
        if body.stream:
            options = OutputOptions(
                body.include_usage,
                body.continuous_usage,
                body.logprobs,
                body.return_token_ids,
                body.include_reasoning,
                body.return_tokens_as_token_ids,
            )
            return EventStreamResponse(stream, ChatChunks(conversation, options, body.calls_finish_reason()))
        collected = await collect(stream)
        work, cost_s = work_of(request), writing_cost_s(collected)
        return await work.run(cost_s, _answer, envelope, conversation, body, collected)

    return router


def _answer(
    envelope: ResponseEnvelope, conversation: Conversation, body: ChatRequest, collected: list[Collected]
) -> Response:
    stream = conversation.stream
    choices = [_choice(entry, conversation, body) for entry in collected]
    answer = envelope.fields("chat.completion") | {"choices": choices, "usage": usage(stream.choices)}
    answer |= _prompt_fields(stream, collected, body, conversation.model)
    return json_response(answer, response_headers(stream))


def _choice(entry: Collected, conversation: Conversation, body: ChatRequest) -> dict[str, Any]:
    output = entry.output
    names = token_names(conversation.model.tokenizer, body.return_tokens_as_token_ids)
    message, num_calls = _message(output, conversation, body.include_reasoning)
    return {
        "index": output.index,
        "message": message,
        "logprobs": None,
        "finish_reason": chat_finish_reason(output.finish_reason, num_calls, body.calls_finish_reason()),
        "stop_reason": output.stop_reason,
        "token_ids": None,
        **chat_token_fields(output, names, logprobs=body.logprobs, token_ids=body.return_token_ids, is_whole=True),
    }


def _message(
    output: CompletionOutput, conversation: Conversation, include_reasoning: bool
) -> tuple[dict[str, Any], int]:
    """The assistant's message, and how many calls are in it."""
    message: dict[str, Any] = {"role": "assistant", "content": output.text, "refusal": None, "reasoning": None}
    if not conversation.parsers:
        return message, 0
    answer, parser = ParsedAnswer(), conversation.parsers[output.index]
    answer.add(parser.push(output.text))
    answer.add(parser.flush())
    message["content"] = answer.content or (None if answer.calls or answer.reasoning else "")
    if answer.reasoning and include_reasoning:
        message |= reasoning_fields(answer.reasoning)
    if answer.calls:
        plan = conversation.plan
        message["tool_calls"] = [
            call_fields(call.name, plan.new_call_id(), call.arguments, call.name in plan.custom)
            for call in answer.calls
        ]
    return message, len(answer.calls)


def _prompt_fields(
    stream: EventStream, collected: list[Collected], body: ChatRequest, model: ServedModel
) -> dict[str, Any]:
    """vLLM's extensions about the prompt; null where they are not asked for, as clients read them without asking."""
    fields: dict[str, Any] = {"prompt_logprobs": None, "prompt_token_ids": None, "kv_transfer_params": None}
    entries = collected[0].prompt_logprobs
    if body.prompt_logprobs is not None and entries is not None:
        fields["prompt_logprobs"] = prompt_logprobs(entries, model.tokenizer)
    if body.return_token_ids:
        fields["prompt_token_ids"] = stream.choices[0].request.prompt_token_ids
    return fields


ENDPOINT = Endpoint(
    lambda api: chat_routes(api.client, api.limits), (ChatRequest,), generating=("/v1/chat/completions",)
)
