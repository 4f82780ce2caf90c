"""Chat completions that clients want to keep (`store`), beside the kept responses: one store, the same bounds.

An entry's header is what lists are filtered by and what can be changed: model and metadata. Its first chunk is the list
of messages that were sent, its second the completion.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from fastapi import Request

from app.api.chat.chat_request import ChatRequest
from app.api.chat.conversation import Conversation
from app.api.chat.messages import ChatMessage
from app.api.endpoint import Api
from app.api.http.json_response import json_bytes, written
from app.api.http.service_terms import tier_of
from app.api.http.work_pool import PARSE_S_PER_BYTE, RequestWork, unwatched_work_of
from app.api.openai.chat_answer import SaidChoice, chat_answer
from app.api.openai.logprobs import writing_cost_s
from app.api.openai.response_store import READ_S_PER_BYTE
from app.api.store.entries import NEW, Birth, Seen, StoreConflictError, Stored
from app.api.store.keeping import is_kept
from app.api.store.leased_entry import MAX_ATTEMPTS
from app.api.store.tenant_store import TenantStore
from app.errors import InvalidRequestError, OverloadedError

PREFIX = "chatcmpl-"
LABEL = "chat"
SCAN = 256  # entries whose headers are looked at in one call of the store


class CompletionNotFoundError(InvalidRequestError):
    """No chat completion is kept under this id for this tenant."""

    status = 404
    code = "chat_completion_not_found"


@dataclass(slots=True, frozen=True)
class Wanted:
    """Says which completions a list shows."""

    model: str | None
    metadata: Mapping[str, str]

    def among(self, page: Sequence[Stored]) -> list[Stored]:
        """Those of `page`."""
        return [stored for stored in page if self._is(json.loads(stored.header))]

    def _is(self, told: Mapping[str, Any]) -> bool:
        return self.model in (None, told["model"]) and self.metadata.items() <= told["metadata"].items()


class ChatStore:
    """The kept chat completions of all tenants."""

    def __init__(self, entries: TenantStore, max_list_bytes: int, *, keeps_any: bool = True) -> None:
        """`max_list_bytes`: a list of more ends early, and says that there is more."""
        self.entries = entries
        self.keeps_any = keeps_any
        self._max_list_bytes = max_list_bytes

    @classmethod
    def of(cls, api: Api) -> Self:
        """That of an application."""
        keeps_any = api.ingress.max_stored_responses > 0
        return cls(api.stores("responses"), api.limits.max_body_bytes, keeps_any=keeps_any)

    def keeper(self, request: Request, body: ChatRequest, conversation: Conversation) -> ChatKeeper:
        """Keeps the answer to one request."""
        return ChatKeeper(self, request, body, conversation)

    async def find(self, tenant: str, completion_id: str) -> bytes:
        """A completion, as JSON."""
        stored = await self._stored(tenant, completion_id)
        completion = await self._whole(tenant, stored)
        if completion is None:
            raise not_found(completion_id)
        return completion

    async def messages(self, work: RequestWork, tenant: str, completion_id: str) -> list[dict[str, Any]]:
        """Returns the messages that a completion answers."""
        await self._stored(tenant, completion_id)
        chunks = await self.entries.read(tenant, completion_id, 0, 1)
        if not chunks:
            raise not_found(completion_id)
        messages: list[dict[str, Any]] = await work.run(len(chunks[0]) * READ_S_PER_BYTE, json.loads, chunks[0])
        return messages

    async def update(self, tenant: str, completion_id: str, metadata: Mapping[str, str]) -> bytes:
        """Replace a completion's metadata; the completion, as JSON."""
        for _ in range(MAX_ATTEMPTS):
            stored = await self._stored(tenant, completion_id)
            header = json.dumps(json.loads(stored.header) | {"metadata": metadata}).encode()
            try:
                await self.entries.put(tenant, completion_id, header, seen=Seen(stored.version))
            except StoreConflictError:
                continue
            return await self.find(tenant, completion_id)
        raise OverloadedError("the chat completion changes too fast; try again")

    async def page(
        self,
        work: RequestWork,
        tenant: str,
        after: str | None,
        limit: int,
        wanted: Wanted,
        *,
        newest_first: bool,
    ) -> tuple[dict[str, bytes], bool]:
        """Completions that are `wanted`, in the order of their making, by their ids and as JSON, and whether there are
        more."""
        found: dict[str, bytes] = {}
        async for stored in self._all(work, tenant, after, wanted, newest_first):
            if len(found) == limit or sum(map(len, found.values())) > self._max_list_bytes:
                return found, True
            completion = await self._whole(tenant, stored)
            if completion is not None:  # else it was deleted meanwhile
                found[stored.key] = completion
        return found, False

    async def delete(self, tenant: str, completion_id: str) -> None:
        """Forget a completion; CompletionNotFoundError where there is none."""
        if not completion_id.startswith(PREFIX) or not await self.entries.delete(tenant, completion_id):
            raise not_found(completion_id)

    async def _all(
        self, work: RequestWork, tenant: str, after: str | None, wanted: Wanted, newest_first: bool
    ) -> AsyncIterator[Stored]:
        last = after
        while True:
            try:
                page = await self.entries.page(tenant, last, SCAN, newest_first, label=LABEL)
            except StoreConflictError:
                if last == after:
                    raise InvalidRequestError(f"there is no chat completion {last!r}", param="after") from None
                raise OverloadedError("chat completions were deleted meanwhile; try again") from None
            cost_s = PARSE_S_PER_BYTE * sum(len(stored.header) for stored in page)
            for stored in await work.run(cost_s, wanted.among, page):
                yield stored
            if len(page) < SCAN:
                return
            last = page[-1].key

    async def _stored(self, tenant: str, completion_id: str) -> Stored:
        stored = await self.entries.get(tenant, completion_id) if completion_id.startswith(PREFIX) else None
        if stored is None:
            raise not_found(completion_id)
        return stored

    async def _whole(self, tenant: str, stored: Stored) -> bytes | None:
        """A completion as JSON; None when it is kept no more."""
        chunks = await self.entries.read(tenant, stored.key, 1, 1)
        if not chunks:
            return None
        return b'%b,"metadata":%b}' % (chunks[0][:-1], json_bytes(json.loads(stored.header)["metadata"]))


class ChatKeeper:
    """Keeps the answer to one request. A store that fails costs the client nothing but the later use."""

    def __init__(self, kept: ChatStore, request: Request, body: ChatRequest, conversation: Conversation) -> None:
        self._kept = kept
        self._work = unwatched_work_of(request)
        self._tenant: str = request.state.tenant
        self._num_body_bytes: int = request.state.num_body_bytes
        self._request_id: str = request.state.request_id
        self._body = body
        self._conversation = conversation

    async def keep_choices(self, said: Sequence[SaidChoice]) -> bool:
        """Keep the answer that consists of these choices; True if it is kept."""
        return self._kept.keeps_any and await self._is_kept(self._keep_choices(said))

    async def keep(self, answer: Mapping[str, Any], cost_s: float) -> bool:
        """Keep an answer, which takes `cost_s` to write; True if it is kept."""
        return self._kept.keeps_any and await self._is_kept(self._keep(answer, cost_s))

    async def _is_kept(self, keeping: Awaitable[None]) -> bool:
        return await is_kept(f"the chat completion {self._conversation.envelope.id}", keeping)

    async def _keep_choices(self, said: Sequence[SaidChoice]) -> None:
        cost_s = writing_cost_s([one.collected for one in said])
        await self._keep(await self._work.run(cost_s, chat_answer, self._conversation, self._body, said), cost_s)

    async def _keep(self, answer: Mapping[str, Any], cost_s: float) -> None:
        cost_s += 2 * self._num_body_bytes * PARSE_S_PER_BYTE

        def write() -> list[bytes]:
            messages = [_message(f"{answer['id']}-{i}", one) for i, one in enumerate(self._body.messages)]
            return [json_bytes(messages), bytes(written({**answer, **self._asked()}))]

        chunks = await self._work.run(cost_s, write)
        header = json.dumps({"model": answer["model"], "metadata": self._body.metadata or {}}).encode()
        await self._kept.entries.put(
            self._tenant, answer["id"], header, append=chunks, seen=NEW, born=Birth(label=LABEL)
        )

    def _asked(self) -> dict[str, Any]:
        """The part of a kept completion that repeats what was asked for, or what stood in for it."""
        body, request = self._body, self._conversation.stream.choices[0].request
        params, shape, choice = request.sampling, body.response_format, body.tool_choice
        return {
            "request_id": self._request_id,
            "service_tier": tier_of(request.placement.service_class),
            "seed": params.seed,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "presence_penalty": params.presence_penalty,
            "frequency_penalty": params.frequency_penalty,
            "tools": [tool.model_dump(by_alias=True, exclude_none=True) for tool in body.tools or ()] or None,
            "tool_choice": choice if choice is None or isinstance(choice, str) else choice.model_dump(by_alias=True),
            "response_format": None if shape is None else shape.model_dump(by_alias=True, exclude_none=True),
        }


def not_found(completion_id: str) -> CompletionNotFoundError:
    """The refusal of an id that names nothing."""
    return CompletionNotFoundError(
        f"no chat completion is kept under the id {completion_id[:256]!r}", param="completion_id"
    )


def _message(message_id: str, message: ChatMessage) -> dict[str, Any]:
    """A message as OpenAI lists it: its text, and the parts that it was sent as."""
    parts = message.content if isinstance(message.content, list) else None
    said = {"content": None if message.content is None else message.text(), "refusal": None, "name": None}
    said |= message.model_dump(by_alias=True, exclude_none=True, exclude={"content"})
    return {"id": message_id, **said, "content_parts": parts and [part.model_dump(exclude_none=True) for part in parts]}
