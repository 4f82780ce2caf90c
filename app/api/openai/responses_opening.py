"""The conversation that a response continues: its history, the items that it names, and how it is opened."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from fastapi import Request

from app.api.chat.conversation import Conversation, open_conversation
from app.api.chat.envelope import ResponseEnvelope
from app.api.engine_client import EngineClient
from app.api.http.work_pool import TOKENISE_S_PER_CHAR, size_of, work_of
from app.api.openai.response_store import ResponseStore, conversation
from app.api.openai.responses_conversion import num_droppable, to_chat
from app.api.openai.responses_items import InputItem, ItemReference
from app.api.openai.responses_protocol import ResponsesRequest
from app.api.openai.responses_socket import recent_of
from app.config.limits import RequestLimits
from app.errors import InvalidRequestError, PromptTooLongError
from app.text.served_model import ServedModel

BodyT = TypeVar("BodyT", bound=ResponsesRequest)


def check_number(items: Sequence[InputItem], limits: RequestLimits) -> None:
    """Refuse a conversation of more items than the server allows."""
    if len(items) > limits.max_messages:
        raise InvalidRequestError(f"{len(items)} items; at most {limits.max_messages}", param="input")


async def open_items(
    client: EngineClient,
    limits: RequestLimits,
    request: Request,
    body: ResponsesRequest,
    items: Sequence[InputItem],
    model: ServedModel,
    envelope: ResponseEnvelope,
    num_kept: int = 1,
) -> Conversation:
    """The conversation under way; with truncation "auto", without as few of its oldest turns as make it fit, and with
    `num_kept` at least."""
    check_number(items, limits)

    async def attempt(num_dropped: int) -> Conversation:
        cost_s = TOKENISE_S_PER_CHAR * size_of(items)
        chat = await work_of(request).run(cost_s, to_chat, body, items, num_dropped)
        return await open_conversation(client, limits, request, chat, model, envelope)

    try:
        return await attempt(0)
    except PromptTooLongError:
        if body.truncation != "auto":
            raise
    too_few, enough = 0, max(0, num_droppable(body, items) - num_kept + 1)
    conversation = await attempt(enough)  # as short as it gets; raises when that is too long
    while enough - too_few > 1:
        middle = (too_few + enough) // 2
        try:
            conversation, enough = await attempt(middle), middle
        except PromptTooLongError:
            too_few = middle
    return conversation


async def history(kept: ResponseStore, request: Request, previous_id: str | None) -> list[InputItem]:
    """The items of the conversation that a kept response ends, or one of the same websocket; [] when none is named."""
    recent = recent_of(request)
    parts = recent.parts(previous_id) if recent is not None else None
    if parts is None:
        parts = await kept.parts(request.state.tenant, previous_id) if previous_id is not None else ()
    if recent is not None:
        recent.continued = parts
    return await conversation(work_of(request), parts)


async def resolved(kept: ResponseStore, request: Request, items: Sequence[InputItem]) -> list[InputItem]:
    """The same items, with kept ones in place of references to them."""
    ids = [item.id for item in items if isinstance(item, ItemReference)]
    found = await kept.items(work_of(request), request.state.tenant, ids) if ids else {}
    return [found[item.id] if isinstance(item, ItemReference) else item for item in items]


async def with_items(kept: ResponseStore, request: Request, body: BodyT) -> BodyT:
    """The same body without references to items."""
    if not any(isinstance(item, ItemReference) for item in body.items):
        return body
    return body.model_copy(update={"input": await resolved(kept, request, body.items)})
