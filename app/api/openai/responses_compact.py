"""POST /v1/responses/compact: the model sums a conversation up, so that it can go on in less of the context."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, ClassVar

from fastapi import APIRouter, Request
from pydantic import Field

from app.api.chat.blocks import BlockReader, read_blocks
from app.api.chat.envelope import ResponseEnvelope
from app.api.chat.generation import response_headers
from app.api.engine_client import EngineClient
from app.api.generation.placement import PlacementFields
from app.api.generation.render import find_model
from app.api.http.body import describe_body, read_body
from app.api.http.json_response import JSONResponse
from app.api.http.strict_models import StrictModel
from app.api.openai.response_store import ResponseStore
from app.api.openai.responses_answer import item_id, new_id, usage
from app.api.openai.responses_items import ID_PREFIXES, InputItem, MessageItem, has_media, packed, text_of
from app.api.openai.responses_opening import check_number, history, open_items, resolved
from app.api.openai.responses_protocol import IGNORED, ResponsesRequest
from app.bounds import Items, Text
from app.config.limits import RequestLimits
from app.errors import InvalidRequestError, MantaError

SHARE = 4  # of the context that a summary may take at most, one part in so many
MAX_TOKENS = 4096
_TASK = (
    "Sum up our conversation so far for yourself, who will go on with it and see nothing else: what I asked for and "
    "decided, what was found and done, names, paths, numbers and errors as they were, and what is left to do. Write "
    "only the summary."
)


class CompactRequest(PlacementFields, StrictModel):
    """Body of POST /v1/responses/compact."""

    ignored: ClassVar[Mapping[str, str]] = IGNORED
    is_lenient: ClassVar[bool] = True

    model: str | None = Field(None, description="Which model; the server's first one when not given.")
    input: Text | Items[InputItem] = Field(default_factory=list, description="A text, or the items of a conversation.")
    instructions: Text | None = Field(None, description="What the model was told first.")
    previous_response_id: str | None = Field(None, max_length=256, description="The kept response that ends it.")
    prompt_cache_key: str | None = Field(None, description="Names the session, as in a response.")

    def as_response(self, items: list[InputItem], max_tokens: int) -> ResponsesRequest:
        """The request that sums `items` up."""
        task = MessageItem(role="user", content=_TASK)
        fields = {name: getattr(self, name) for name in ("model", "instructions", "prompt_cache_key")}
        fields |= self.placement_fields() | {"max_output_tokens": max_tokens, "truncation": "auto", "store": False}
        return ResponsesRequest.model_validate(fields | {"input": [*items, task]})


def add_compaction(router: APIRouter, client: EngineClient, limits: RequestLimits, kept: ResponseStore) -> None:
    """The route over `client`."""

    @router.post("/v1/responses/compact", openapi_extra=describe_body(CompactRequest))
    async def compact_response(request: Request) -> JSONResponse:
        """Sum a conversation up: its user's messages, and an item that stands for all else in later requests."""
        body = await read_body(request, CompactRequest)
        model = find_model(client, body.model)
        given = [MessageItem(role="user", content=body.input)] if isinstance(body.input, str) else body.input
        items = [*await history(kept, request, body.previous_response_id), *await resolved(kept, request, given)]
        check_number(items, limits)
        if not items:
            raise InvalidRequestError("the conversation is empty", param="input")
        envelope = ResponseEnvelope.of("resp", model, body.model)
        asked = body.as_response(items, max(1, min(MAX_TOKENS, model.max_model_len // SHARE)))
        conversation = await open_items(client, limits, request, asked, asked.items, model, envelope, num_kept=2)
        reader = BlockReader(conversation.parsers[0] if conversation.parsers else None, conversation.plan.max_calls)
        choice = await read_blocks(conversation.stream, reader)
        shown = _answer(items, _summary(reader), usage(choice, reader))
        return JSONResponse(shown, headers=response_headers(conversation.stream))


def _summary(reader: BlockReader) -> str:
    """The text of an answer; of one that was cut short while the model reasoned, the reasoning."""
    for kind in ("text", "reasoning"):
        if text := "".join(block.text for block in reader.blocks if block.kind == kind).strip():
            return text
    raise MantaError("the model wrote no summary; the conversation is as it was")


def _parts(item: MessageItem) -> list[dict[str, Any]]:
    if isinstance(item.content, list) and has_media(item.content):
        return [part.model_dump(exclude_none=True) for part in item.content]
    return [{"type": "input_text", "text": text_of(item.content)}]


def _answer(items: list[InputItem], summary: str, used: dict[str, Any]) -> dict[str, Any]:
    response_id = new_id("resp")
    said = [item for item in items if isinstance(item, MessageItem) and item.role == "user"]
    output: list[dict[str, Any]] = [
        {
            "id": item_id(ID_PREFIXES["message"], response_id, i),
            "type": "message",
            "role": "user",
            "status": "completed",
            "content": _parts(item),
        }
        for i, item in enumerate(said)
    ]
    compaction = {"type": "compaction", "encrypted_content": packed(summary)}
    output.append({"id": item_id(ID_PREFIXES["compaction"], response_id, len(said)), **compaction})
    return {
        "id": response_id,
        "object": "response.compaction",
        "created_at": int(time.time()),
        "output": output,
        "usage": used,
    }
