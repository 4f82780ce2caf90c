"""POST /v1/responses, and GET and DELETE of those that are kept."""

from __future__ import annotations

import json
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from fastapi import APIRouter, Request
from pydantic import TypeAdapter
from starlette.responses import JSONResponse, Response

from app.api.blocks import BlockReader, read_blocks
from app.api.body import describe_body, read_body
from app.api.engine_client import EngineClient, ServedModel
from app.api.openai.conversation import Conversation, open_conversation
from app.api.openai.generation import response_headers
from app.api.openai.head import ResponseHead
from app.api.openai.responses_answer import ResponseAnswer, ResponseEvents, new_id
from app.api.openai.responses_conversion import num_droppable, to_chat
from app.api.openai.responses_protocol import InputItem, ResponsesRequest
from app.api.render import find_model
from app.api.response_store import ResponseStore, StoredResponse
from app.api.sse import EventStreamResponse
from app.config import RequestLimits
from app.errors import InvalidRequestError, MantaError, PromptTooLongError

logger = logging.getLogger("manta.api")

_ITEMS: TypeAdapter[list[InputItem]] = TypeAdapter(list[InputItem])
_ID_PREFIXES = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}


class ResponseNotFoundError(InvalidRequestError):
    """No response is kept under this id for this tenant."""

    status = 404
    code = "response_not_found"


class PreviousResponseNotFoundError(InvalidRequestError):
    """The response to be continued, or one before it, is not kept."""

    code = "previous_response_not_found"


def response_routes(client: EngineClient, limits: RequestLimits, store: ResponseStore) -> APIRouter:
    """The endpoints of responses over `client`; kept in `store`."""
    router = APIRouter(tags=["openai"])

    @router.post("/v1/responses", openapi_extra=describe_body(ResponsesRequest))
    async def create_response(request: Request) -> Response:
        """Answer a conversation; `stream` makes it server-sent events."""
        body = await read_body(request, ResponsesRequest)
        model = find_model(client, body.model)
        items = [*await _history(store, request.state.tenant, body.previous_response_id), *body.items]
        head = ResponseHead.of("resp", model, body.model)
        head.id = new_id("resp")
        conversation = await _open(client, limits, request, body, items, model, head)
        parser = conversation.parsers[0] if conversation.parsers else None
        reader = BlockReader(parser, conversation.max_calls)
        stream = conversation.stream
        answer = ResponseAnswer(head.id, head.model, body, stream.choices[0], reader, conversation.plan.new_call_id)
        keep = _keeper(store, request.state.tenant, body, answer)
        if body.stream:
            return EventStreamResponse(stream, ResponseEvents(answer, keep))
        await read_blocks(stream, reader)
        await keep()
        return JSONResponse(answer.response(), headers=response_headers(stream))

    @router.get("/v1/responses/{response_id}")
    async def get_response(request: Request, response_id: str) -> JSONResponse:
        """A kept response."""
        if request.query_params.get("stream") == "true":
            raise InvalidRequestError("a kept response is not streamed again", param="stream")
        record = await _find(store, request.state.tenant, response_id)
        return JSONResponse(record["response"])

    @router.delete("/v1/responses/{response_id}")
    async def delete_response(request: Request, response_id: str) -> JSONResponse:
        """Forget a response. Those that continue it can then not be continued further."""
        if not await store.delete(request.state.tenant, response_id):
            raise _not_found(response_id)
        return JSONResponse({"id": response_id, "object": "response", "deleted": True})

    @router.get("/v1/responses/{response_id}/input_items")
    async def list_input_items(request: Request, response_id: str) -> JSONResponse:
        """What a kept response was asked, in pages."""
        record = await _find(store, request.state.tenant, response_id)
        return JSONResponse(_page(record["input"], request))

    return router


async def _open(
    client: EngineClient,
    limits: RequestLimits,
    request: Request,
    body: ResponsesRequest,
    items: Sequence[InputItem],
    model: ServedModel,
    head: ResponseHead,
) -> Conversation:
    """The conversation under way; with truncation "auto", without as few of its oldest turns as make it fit."""
    if len(items) > limits.max_messages:
        raise InvalidRequestError(f"{len(items)} items; at most {limits.max_messages}", param="input")

    async def attempt(num_dropped: int) -> Conversation:
        return await open_conversation(client, limits, request, to_chat(body, items, num_dropped), model, head)

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


async def _history(store: ResponseStore, tenant: str, previous_id: str | None) -> list[InputItem]:
    """The items of the conversation that a kept response ends: what was asked and answered, in order."""
    if previous_id is None:
        return []
    records = await store.chain(tenant, previous_id)
    if not records:
        raise PreviousResponseNotFoundError(
            f"the response {previous_id!r}, or one before it, is not kept", param="previous_response_id"
        )
    items: list[dict[str, Any]] = []
    for record in map(json.loads, (record.data for record in records)):
        items += [*record["input"], *record["response"]["output"]]
    return _ITEMS.validate_python(items)


def _keeper(
    store: ResponseStore, tenant: str, body: ResponsesRequest, answer: ResponseAnswer
) -> Callable[[], Awaitable[None]]:
    """What keeps the response once it is whole. A store that fails costs the client nothing but the later use."""

    async def keep() -> None:
        if not body.store:
            return
        items = [item.model_dump(exclude_none=True) for item in body.items]
        given = [{"id": new_id(_ID_PREFIXES[item["type"]]), "status": "completed", **item} for item in items]
        data = json.dumps({"response": answer.response(), "input": given}).encode()
        try:
            await store.put(tenant, StoredResponse(answer.id, data, body.previous_response_id))
        except MantaError as error:
            logger.warning("the response %s is not kept: %s", answer.id, error.message)

    return keep


async def _find(store: ResponseStore, tenant: str, response_id: str) -> dict[str, Any]:
    record = await store.get(tenant, response_id)
    if record is None:
        raise _not_found(response_id)
    found: dict[str, Any] = json.loads(record.data)
    return found


def _not_found(response_id: str) -> ResponseNotFoundError:
    return ResponseNotFoundError(f"no response is kept under the id {response_id!r}", param="response_id")


def _page(items: list[dict[str, Any]], request: Request) -> dict[str, Any]:
    """A page of items: `limit` of them after the one named by `after`, the newest first unless `order` is asc."""
    order, limit = request.query_params.get("order", "desc"), request.query_params.get("limit", "20")
    if order not in ("asc", "desc"):
        raise InvalidRequestError("must be asc or desc", param="order")
    if not limit.isascii() or not limit.isdigit() or not 1 <= int(limit[:9]) <= 100:
        raise InvalidRequestError("must be from 1 to 100", param="limit")
    shown = [_shown(item) for item in (items if order == "asc" else items[::-1])]
    ids = [item["id"] for item in shown]
    after = request.query_params.get("after")
    if after is not None and after not in ids:
        raise InvalidRequestError(f"there is no item {after!r}", param="after")
    start = ids.index(after) + 1 if after is not None else 0
    page = shown[start : start + int(limit)]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": start + len(page) < len(shown),
    }


def _shown(item: dict[str, Any]) -> dict[str, Any]:
    """An input item with the content of messages as parts, as OpenAI lists it."""
    if item["type"] == "message" and isinstance(item["content"], str):
        kind = "output_text" if item["role"] == "assistant" else "input_text"
        part: dict[str, Any] = {"type": kind, "text": item["content"]}
        return {**item, "content": [part | ({"annotations": []} if kind == "output_text" else {})]}
    return item
