"""POST /v1/responses and /v1/responses/input_tokens; GET, DELETE and cancel of those that are kept."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Message

from app.api.chat.blocks import BlockReader, read_blocks
from app.api.chat.conversation import Conversation
from app.api.chat.envelope import ResponseEnvelope
from app.api.chat.generation import response_headers
from app.api.chat.prompt import render_chat
from app.api.endpoint import Endpoint
from app.api.engine_client import EngineClient
from app.api.generation.render import counting_room, find_model
from app.api.generation.sse import EventStreamResponse
from app.api.http.body import describe_body, read_body
from app.api.http.errors import in_words_of
from app.api.http.held_bytes import holding_of
from app.api.http.json_response import JSONResponse, json_response, utf8
from app.api.http.query import bool_param, int_param, list_page, page_of
from app.api.http.service_terms import DETACHED
from app.api.http.work_pool import TOKENISE_S_PER_CHAR, size_of, unwatched_work_of, work_of
from app.api.openai.logprobs import entries_cost_s, token_names
from app.api.openai.response_store import READ_S_PER_BYTE, ResponseStore, not_found
from app.api.openai.responses_answer import FIRST_ASKED, ResponseAnswer, ResponseEvents, item_id, new_id
from app.api.openai.responses_background import BackgroundResponses
from app.api.openai.responses_compact import CompactRequest, add_compaction
from app.api.openai.responses_conversion import to_chat
from app.api.openai.responses_items import ID_PREFIXES
from app.api.openai.responses_opening import check_number, history, open_items, with_items
from app.api.openai.responses_protocol import InputTokensRequest, ResponsesRequest
from app.api.openai.responses_socket import Keep, read_request, recent_of, stream_of
from app.api.store.keeping import is_kept
from app.api.store.tenant_store import TenantStore
from app.config.ingress import IngressConfig
from app.config.limits import RequestLimits
from app.errors import InvalidRequestError

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
        body = await with_items(kept, request, await read_request(request))
        tenant, num_bytes = request.state.tenant, request.state.num_body_bytes
        if body.background:
            background.check_room(tenant)
            request = Request(request.scope, _stay)
            setattr(request.state, DETACHED, True)
        answer, conversation = await _begin(client, limits, request, body, kept)
        stream = conversation.stream
        if body.background:
            asked = await work_of(request).run(num_bytes * READ_S_PER_BYTE, _asked, body, answer.id)
            response = await background.start(
                tenant, work_of(request), answer, stream, asked, holding_of(request.scope)
            )
            if body.stream:
                return _event_stream(background.follow(tenant, answer.id, -1))
            return JSONResponse(response)
        answer.is_kept = body.store and ingress.max_stored_responses > 0
        keepers = _keepers(request, body, kept if answer.is_kept else None)
        keep = _keeper(keepers, request, num_bytes, body, answer) if keepers else _forget
        if not body.generates:
            return _event_stream(_unsaid(ResponseEvents(answer, keep)))
        if body.stream:
            return EventStreamResponse(stream, ResponseEvents(answer, keep))
        await read_blocks(stream, answer.reader)
        await keep()
        headers = response_headers(stream)
        return await work_of(request).run(_writing_cost_s(answer), lambda: json_response(answer.response(), headers))

    @router.post("/v1/responses/input_tokens", openapi_extra=describe_body(InputTokensRequest))
    async def count_input_tokens(request: Request) -> JSONResponse:
        """Counts the tokens of the input of a response, its instructions, tools and history within."""
        body = await with_items(kept, request, await read_body(request, InputTokensRequest))
        model = find_model(client, body.model)
        items = [*await history(kept, request, body.previous_response_id), *body.items]
        check_number(items, limits)
        chat = await work_of(request).run(TOKENISE_S_PER_CHAR * size_of(items), to_chat, body, items)
        with in_words_of(chat.field_names()):
            room = counting_room(model, "messages")
            prompt = await render_chat(work_of(request), model, chat.chat_options(), limits, room)
        return JSONResponse({"object": "response.input_tokens", "input_tokens": len(prompt.token_ids)})

    add_compaction(router, client, limits, kept)
    _add_kept_routes(router, kept, background)
    return router


def _add_kept_routes(router: APIRouter, kept: ResponseStore, background: BackgroundResponses) -> None:
    """Adds the routes for a response that is kept."""

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
        """Lists what a kept response was asked, in pages."""
        items = await kept.input_items(work_of(request), request.state.tenant, response_id)
        found, has_more = page_of(request, items, newest_first=True)
        return JSONResponse(list_page([_shown(item) for item in found], has_more))


async def _begin(
    client: EngineClient, limits: RequestLimits, request: Request, body: ResponsesRequest, kept: ResponseStore
) -> tuple[ResponseAnswer, Conversation]:
    """The response that `body` asks for, and the conversation that makes it; nothing runs yet."""
    model = find_model(client, body.model)
    items = [*await history(kept, request, body.previous_response_id), *body.items]
    envelope = ResponseEnvelope.of("resp", model, body.model)
    envelope.id = new_id("resp")
    conversation = await open_items(client, limits, request, body, items, model, envelope)
    parser = conversation.parsers[0] if conversation.parsers else None
    reader = BlockReader(parser, conversation.plan.max_calls)
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


def _asked(body: ResponsesRequest, response_id: str) -> bytes:
    """The items of the input, each with its id, as JSON."""
    items = [item.model_dump(exclude_none=True) for item in body.items]
    given = [
        {"id": item_id(ID_PREFIXES[item["type"]], response_id, FIRST_ASKED + i), "status": "completed", **item}
        for i, item in enumerate(items)
    ]
    return json.dumps(given).encode()


def _writing_cost_s(answer: ResponseAnswer) -> float:
    """Estimate of the time that writing the response takes, for a WorkPool."""
    return sum(entries_cost_s(block.logprobs) for block in answer.reader.blocks)


def _keepers(request: Request, body: ResponsesRequest, kept: ResponseStore | None) -> list[Keep]:
    """Those who keep the response: its websocket, where it came by one, and the store."""
    recent = recent_of(request)
    keepers: list[Keep] = [] if recent is None else [recent.keeper(stream_of(body))]
    return keepers if kept is None else [*keepers, kept.keep]


async def _unsaid(events: ResponseEvents) -> AsyncIterator[bytes]:
    """The events of a response for which nothing is generated: later ones may continue it."""
    yield utf8(events.start())
    await events.finish()
    yield utf8(events.end())


def _keeper(
    keepers: Sequence[Keep], request: Request, num_bytes: int, body: ResponsesRequest, answer: ResponseAnswer
) -> Callable[[], Awaitable[None]]:
    """Returns the call that keeps the response once it is whole; where that fails, the answer's `store` is false."""
    work = unwatched_work_of(request)

    async def keep() -> None:
        asked = await work.run(num_bytes * READ_S_PER_BYTE, _asked, body, answer.id)
        response = await work.run(_writing_cost_s(answer), answer.response)
        for keep_in in keepers:
            await keep_in(request.state.tenant, response, asked)

    async def try_to_keep() -> None:
        is_done = await is_kept(f"the response {answer.id}", keep())
        answer.is_kept = answer.is_kept and is_done  # its websocket may remember what the store is not to keep

    return try_to_keep


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
    (ResponsesRequest, InputTokensRequest, CompactRequest),
    generating=("/v1/responses", "/v1/responses/compact"),
    sockets=("/v1/responses",),
)
