"""POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from app.api.anthropic.answer import Answer, MessageEvents, new_message_id
from app.api.anthropic.conversion import MessagesChat, ignored_fields, to_chat
from app.api.anthropic.protocol import CountTokensRequest, MessagesRequest
from app.api.chat.blocks import BlockReader, read_blocks
from app.api.chat.conversation import Conversation, open_conversation
from app.api.chat.envelope import ResponseEnvelope
from app.api.chat.generation import response_headers
from app.api.chat.prompt import render_chat
from app.api.endpoint import Endpoint
from app.api.engine_client import EngineClient
from app.api.generation.render import counting_room, find_model
from app.api.generation.sse import EventStreamResponse
from app.api.http.body import describe_body, read_body
from app.api.http.errors import in_words_of
from app.api.http.field_rule import rule_of
from app.api.http.json_response import JSONResponse
from app.api.http.work_pool import TOKENISE_S_PER_CHAR, size_of, work_of
from app.config.limits import RequestLimits
from app.errors import PromptTooLongError
from app.text.served_model import ServedModel


def message_routes(client: EngineClient, limits: RequestLimits) -> APIRouter:
    """Anthropic's endpoints over `client`."""
    router = APIRouter(tags=["anthropic"])

    @router.post("/v1/messages", openapi_extra=describe_body(MessagesRequest))
    async def create_message(request: Request) -> Response:
        """Answer a conversation; `stream` makes it server-sent events."""
        body = await read_body(request, MessagesRequest)
        model = find_model(client, body.model)
        rule_of(request).count(request, ignored_fields(body, model))
        chat = await work_of(request).run(TOKENISE_S_PER_CHAR * size_of(body), to_chat, body, model)
        envelope = ResponseEnvelope.of("msg", model, body.model)
        envelope.id = new_message_id()
        conversation, is_capped = await _open(client, limits, request, chat, model, envelope)
        parser = conversation.parsers[0] if conversation.parsers else None
        reader = BlockReader(parser, conversation.plan.max_calls)
        shows_reasoning = body.thinking is None or body.thinking.display != "omitted"
        answer = Answer(envelope.id, envelope.model, reader, conversation.plan.new_call_id, is_capped, shows_reasoning)
        stream = conversation.stream
        if body.stream:
            return EventStreamResponse(stream, MessageEvents(answer, stream.choices[0], request.state.request_id))
        choice = await read_blocks(stream, reader)
        return JSONResponse(answer.message(choice), headers=response_headers(stream))

    @router.post("/v1/messages/count_tokens", openapi_extra=describe_body(CountTokensRequest))
    async def count_tokens(request: Request) -> JSONResponse:
        """Counts the tokens of a conversation's prompt."""
        body = await read_body(request, CountTokensRequest)
        model = find_model(client, body.model)
        rule_of(request).count(request, ignored_fields(body, model))
        work, room = work_of(request), counting_room(model, "messages")
        chat = await work.run(TOKENISE_S_PER_CHAR * size_of(body), to_chat, body, model)
        with in_words_of(chat.field_names()):
            prompt = await render_chat(work, model, chat.chat_options(), limits, room)
        return JSONResponse({"input_tokens": len(prompt.token_ids)})

    return router


async def _open(
    client: EngineClient,
    limits: RequestLimits,
    request: Request,
    chat: MessagesChat,
    model: ServedModel,
    envelope: ResponseEnvelope,
) -> tuple[Conversation, bool]:
    """The conversation under way, and whether the model's context leaves less room than max_tokens asks for.

    As at Anthropic, that is no error: the answer then ends with the context.
    """
    try:
        return await open_conversation(client, limits, request, chat, model, envelope), False
    except PromptTooLongError as error:
        if error.param != "max_tokens":
            raise
    roomy = chat.model_copy(update={"max_tokens": None})
    return await open_conversation(client, limits, request, roomy, model, envelope), True


ENDPOINT = Endpoint(
    lambda api: message_routes(api.client, api.limits),
    (
        MessagesRequest,
        CountTokensRequest,
    ),
    generating=("/v1/messages",),
)
