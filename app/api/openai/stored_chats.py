"""GET, POST and DELETE of chat completions that are kept: /v1/chat/completions and /v1/chat/completions/{id}."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from pydantic import Field, ValidationInfo, model_validator
from starlette.responses import Response

from app.api.endpoint import Endpoint
from app.api.http.body import describe_body, read_body
from app.api.http.json_response import JSONResponse, json_bytes
from app.api.http.query import choice_param, int_param, list_page, map_param, page_of, text_param
from app.api.http.strict_models import StrictModel, sort_fields
from app.api.http.work_pool import work_of
from app.api.openai.chat_store import ChatStore, Wanted
from app.bounds import MAX_METADATA, MAX_METADATA_CHARS, MAX_METADATA_KEY_CHARS, Metadata

PATH = "/v1/chat/completions"


class CompletionUpdate(StrictModel):
    """Body of POST /v1/chat/completions/{completion_id}."""

    metadata: Metadata = Field(description="Takes the place of what the completion has; null: none.")

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, data: Any, info: ValidationInfo) -> Any:
        """Null means no metadata; to give none at all is a fault."""
        if isinstance(data, dict) and "metadata" in data and data["metadata"] is None:
            return {**sort_fields(cls, data, info), "metadata": {}}
        return sort_fields(cls, data, info)


def stored_chat_routes(kept: ChatStore) -> APIRouter:
    """The endpoints of what is in `kept`."""
    router = APIRouter(tags=["openai"])

    @router.get(PATH)
    async def list_completions(request: Request) -> Response:
        """The kept chat completions of the caller, in pages, the oldest first; by `model` and `metadata[key]=value`."""
        is_newest_first = choice_param(request, "order", ("asc", "desc")) == "desc"
        limit, after = int_param(request, "limit", 20, 1, 100), text_param(request, "after")
        metadata = map_param(request, "metadata", MAX_METADATA, MAX_METADATA_KEY_CHARS, MAX_METADATA_CHARS)
        wanted = Wanted(text_param(request, "model"), metadata)
        tenant, work = request.state.tenant, work_of(request)
        found, has_more = await kept.page(work, tenant, after, limit, wanted, newest_first=is_newest_first)
        page = list_page([{"id": completion_id} for completion_id in found], has_more)
        del page["data"]
        body = b'{"data":[%b],%b' % (b",".join(found.values()), json_bytes(page)[1:])
        return Response(body, media_type="application/json")

    @router.get(PATH + "/{completion_id}")
    async def get_completion(request: Request, completion_id: str) -> Response:
        """A kept chat completion."""
        completion = await kept.find(request.state.tenant, completion_id)
        return Response(completion, media_type="application/json")

    @router.post(PATH + "/{completion_id}", openapi_extra=describe_body(CompletionUpdate))
    async def update_completion(request: Request, completion_id: str) -> Response:
        """Replace the metadata of a kept chat completion."""
        body = await read_body(request, CompletionUpdate)
        completion = await kept.update(request.state.tenant, completion_id, body.metadata)
        return Response(completion, media_type="application/json")

    @router.delete(PATH + "/{completion_id}")
    async def delete_completion(request: Request, completion_id: str) -> JSONResponse:
        """Forget a kept chat completion."""
        await kept.delete(request.state.tenant, completion_id)
        return JSONResponse({"id": completion_id, "object": "chat.completion.deleted", "deleted": True})

    @router.get(PATH + "/{completion_id}/messages")
    async def list_messages(request: Request, completion_id: str) -> JSONResponse:
        """Lists the messages that a kept chat completion answers, in pages, the first one first."""
        messages = await kept.messages(work_of(request), request.state.tenant, completion_id)
        return JSONResponse(list_page(*page_of(request, messages, newest_first=False)))

    return router


ENDPOINT = Endpoint(lambda api: stored_chat_routes(ChatStore.of(api)), (CompletionUpdate,))
