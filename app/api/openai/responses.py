"""POST /v1/responses and /v1/responses/input_tokens; GET, DELETE and cancel of those that are kept."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Message

from app.api.body import describe_body, read_body
from app.api.chat.blocks import BlockReader, read_blocks
from app.api.chat.conversation import Conversation, open_conversation
from app.api.chat.envelope import ResponseEnvelope
from app.api.chat.generation import response_headers
from app.api.chat.prompt import render_chat
from app.api.endpoint import Endpoint
from app.api.engine_client import EngineClient, ServedModel
from app.api.errors import in_words_of
from app.api.json_response import json_response
from app.api.openai.logprobs import entries_cost_s, token_names
from app.api.openai.response_store import READ_S_PER_BYTE, ResponseStore, not_found
from app.api.openai.responses_answer import ResponseAnswer, ResponseEvents, new_id
from app.api.openai.responses_background import BackgroundResponses
from app.api.openai.responses_conversion import num_droppable, to_chat
from app.api.openai.responses_protocol import InputItem, InputTokensRequest, ResponsesRequest
from app.api.query import bool_param, choice_param, int_param, list_page, text_param
from app.api.render import counting_room, find_model
from app.api.request_size import size_of
from app.api.service_terms import DETACHED
from app.api.sse import EventStreamResponse
from app.api.store.tenant_store import TenantStore
from app.api.work_pool import TOKENISE_S_PER_CHAR, work_of
from app.config import IngressConfig, RequestLimits
from app.errors import InvalidRequestError, MantaError, PromptTooLongError

logger = logging.getLogger("manta.api")

_ID_PREFIXES = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
    "reasoning": "rs",
}
MAX_EVENTS = 1 << 31


def response_routes(
    client: EngineClient, limits: RequestLimits, ingress: IngressConfig, store: TenantStore
) -> APIRouter:
    """The endpoints of responses over `client`; kept in `store`."""
    router = APIRouter(tags=["openai"])
    kept = ResponseStore(store, limits)
    background = BackgroundResponses(kept, ingress)

    @router.post("/v1/responses", openapi_extra=describe_body(ResponsesRequest))
    async def create_response(request: Request) -> Response:
        """Answer a conversation; `stream` makes it server-sent events, `background` goes on without the client."""
        body = await read_body(request, ResponsesRequest)
        tenant, num_bytes = request.state.tenant, request.state.num_body_bytes
        if body.background:
            background.check_room(tenant)
            request = Request(request.scope, _stay)
            setattr(request.state, DETACHED, True)
        answer, conversation = await _begin(client, limits, request, body, kept)
        stream = conversation.stream
        if body.background:
            asked = await work_of(request).run(num_bytes * READ_S_PER_BYTE, _asked, body)
            response = await background.start(tenant, work_of(request), answer, stream, asked)
            if body.stream:
                return _event_stream(background.follow(tenant, answer.id, -1))
            return JSONResponse(response)
        is_kept = body.store and ingress.max_stored_responses > 0
        keep = _keeper(kept, Request(request.scope, _stay), num_bytes, body, answer) if is_kept else _forget
        if body.stream:
            return EventStreamResponse(stream, ResponseEvents(answer, keep))
        await read_blocks(stream, answer.reader)
        await keep()
        headers = response_headers(stream)
        return await work_of(request).run(_writing_cost_s(answer), lambda: json_response(answer.response(), headers))

    @router.post("/v1/responses/input_tokens", openapi_extra=describe_body(InputTokensRequest))
    async def count_input_tokens(request: Request) -> JSONResponse:
        """How many tokens the input of a response has, its instructions, tools and history within."""
        body = await read_body(request, InputTokensRequest)
        model = find_model(client, body.model)
        items = [*await _history(kept, request, body.previous_response_id), *body.items]
        _check_number(items, limits)
        chat = await work_of(request).run(TOKENISE_S_PER_CHAR * size_of(items), to_chat, body, items)
        with in_words_of(chat.field_names()):
            room = counting_room(model, "messages")
            prompt = await render_chat(work_of(request), model, chat.chat_options(), limits, room)
        return JSONResponse({"object": "response.input_tokens", "input_tokens": len(prompt.token_ids)})

    _add_kept_routes(router, kept, background)
    return router


def _add_kept_routes(router: APIRouter, kept: ResponseStore, background: BackgroundResponses) -> None:
    """What may be done with a response that is kept."""

    @router.get("/v1/responses/{response_id}")
    async def get_response(request: Request, response_id: str) -> Response:
        """A kept response, finished or not; `stream` sends the events of a background response after number
        `starting_after`, while it is made and later."""
        after = int_param(request, "starting_after", -1, 0, MAX_EVENTS)
        stored = await kept.find(request.state.tenant, response_id)
        if not bool_param(request, "stream"):
            return Response(stored.header, media_type="application/json")
        if stored.num_chunks < 2:
            raise InvalidRequestError("only a background response is streamed again", param="stream")
        return _event_stream(background.follow(request.state.tenant, response_id, after))

    @router.post("/v1/responses/{response_id}/cancel")
    async def cancel_response(request: Request, response_id: str) -> Response:
        """End a background response; one that has ended stays as it is."""
        stored = await background.cancel(request.state.tenant, response_id)
        return Response(stored.header, media_type="application/json")

    @router.delete("/v1/responses/{response_id}")
    async def delete_response(request: Request, response_id: str) -> JSONResponse:
        """Forget a response. Those that continue it can then not be continued further."""
        if not await kept.delete(request.state.tenant, response_id):
            raise not_found(response_id)
        return JSONResponse({"id": response_id, "object": "response", "deleted": True})

    @router.get("/v1/responses/{response_id}/input_items")
    async def list_input_items(request: Request, response_id: str) -> JSONResponse:
        """What a kept response was asked, in pages."""
        items = await kept.input_items(work_of(request), request.state.tenant, response_id)
        return JSONResponse(_page(items, request))


async def _begin(
    client: EngineClient, limits: RequestLimits, request: Request, body: ResponsesRequest, kept: ResponseStore
) -> tuple[ResponseAnswer, Conversation]:
    """The response that `body` asks for, and the conversation that makes it; nothing runs yet."""
    model = find_model(client, body.model)
    items = [*await _history(kept, request, body.previous_response_id), *body.items]
    envelope = ResponseEnvelope.of("resp", model, body.model)
    envelope.id = new_id("resp")
    conversation = await _open(client, limits, request, body, items, model, envelope)
    parser = conversation.parsers[0] if conversation.parsers else None
    reader = BlockReader(parser, conversation.max_calls)
    choice, names = conversation.stream.choices[0], token_names(model.tokenizer, as_ids=False)
    return ResponseAnswer(
        envelope.id, envelope.model, body, choice, reader, conversation.plan.new_call_id, names
    ), conversation


async def _forget() -> None:
    """Keep nothing: the client does not want it, or the server has no room for any."""


async def _stay() -> Message:
    """The client of a background response never leaves."""
    return await asyncio.Future()


def _event_stream(events: AsyncIterator[bytes]) -> StreamingResponse:
    async def write() -> AsyncIterator[bytes]:
        async for event in events:
            yield event or b": keep-alive\n\n"

    headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
    return StreamingResponse(write(), media_type="text/event-stream", headers=headers)


def _check_number(items: Sequence[InputItem], limits: RequestLimits) -> None:
    if len(items) > limits.max_messages:
        raise InvalidRequestError(f"{len(items)} items; at most {limits.max_messages}", param="input")


async def _open(
    client: EngineClient,
    limits: RequestLimits,
    request: Request,
    body: ResponsesRequest,
    items: Sequence[InputItem],
    model: ServedModel,
    envelope: ResponseEnvelope,
) -> Conversation:
    """The conversation under way; with truncation "auto", without as few of its oldest turns as make it fit."""
    _check_number(items, limits)

    async def attempt(num_dropped: int) -> Conversation:
        cost_s = TOKENISE_S_PER_CHAR * size_of(items)
        chat = await work_of(request).run(cost_s, to_chat, body, items, num_dropped)
        return await open_conversation(client, limits, request, chat, model, envelope)

    try:
        return await attempt(0)
    except PromptTooLongError:
        if body.truncation != "auto":
            raise
    too_few, enough = 0, num_droppable(body, items)
    conversation = await attempt(enough)  # as short as it gets; raises when that is too long
    while enough - too_few > 1:
        middle = (too_few + enough) // 2
        try:
            conversation, enough = await attempt(middle), middle
        except PromptTooLongError:
            too_few = middle
    return conversation


async def _history(kept: ResponseStore, request: Request, previous_id: str | None) -> list[InputItem]:
    """The items of the conversation that a kept response ends; [] when none is named."""
    if previous_id is None:
        return []
    return await kept.history(work_of(request), request.state.tenant, previous_id)


def _asked(body: ResponsesRequest) -> bytes:
    """The items of the input, each with its id, as JSON."""
    items = [item.model_dump(exclude_none=True) for item in body.items]
    given = [{"id": new_id(_ID_PREFIXES[item["type"]]), "status": "completed", **item} for item in items]
    return json.dumps(given).encode()


def _writing_cost_s(answer: ResponseAnswer) -> float:
    """Estimate of the time that writing the response takes, for a WorkPool."""
    return sum(entries_cost_s(block.logprobs) for block in answer.reader.blocks)


def _keeper(
    kept: ResponseStore, request: Request, num_bytes: int, body: ResponsesRequest, answer: ResponseAnswer
) -> Callable[[], Awaitable[None]]:
    """What keeps the response once it is whole. A store that fails costs the client nothing but the later use."""

    async def keep() -> None:
        try:
            asked = await work_of(request).run(num_bytes * READ_S_PER_BYTE, _asked, body)
            response = await work_of(request).run(_writing_cost_s(answer), answer.response)
            await kept.keep(request.state.tenant, response, asked)
        except MantaError as error:
            logger.warning("the response %s is not kept: %s", answer.id, error.message)

    return keep


def _page(items: list[dict[str, Any]], request: Request) -> dict[str, Any]:
    """A page of items: `limit` of them after the one named by `after`, the newest first unless `order` is asc."""
    order = choice_param(request, "order", ("desc", "asc"))
    limit, after = int_param(request, "limit", 20, 1, 100), text_param(request, "after")
    shown = items if order == "asc" else items[::-1]
    ids = [item["id"] for item in shown]
    if after is not None and after not in ids:
        raise InvalidRequestError(f"there is no item {after!r}", param="after")
    start = ids.index(after) + 1 if after is not None else 0
    page = [_shown(item) for item in shown[start : start + limit]]
    return list_page(page, start + limit < len(shown))


def _shown(item: dict[str, Any]) -> dict[str, Any]:
    """An input item with the content of messages as parts, as OpenAI lists it."""
    if item["type"] != "message":
        return item
    content, is_said = item["content"], item["role"] == "assistant"
    if isinstance(content, str):
        content = [{"type": "output_text" if is_said else "input_text", "text": content}]
    parts = [{"annotations": [], **part} if part["type"] == "output_text" else part for part in content]
    return {**item, "content": parts}


ENDPOINT = Endpoint(
    lambda api: response_routes(api.client, api.limits, api.ingress, api.stores("responses")),
    (ResponsesRequest, InputTokensRequest),
    generating=("/v1/responses",),
)
