"""Responses that are kept for later: `previous_response_id`, GET, stream and DELETE of /v1/responses/{id}.

An entry's header is the response as JSON, its first chunk the items that were its input, each further chunk one event
of its stream: event N is chunk N + 1. A response that nobody works on any more, though it has not ended, has failed.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from pydantic import TypeAdapter

from app.api.http.json_response import utf8
from app.api.http.work_pool import PARSE_S_PER_BYTE, RequestWork
from app.api.openai.responses_answer import event_text, response_of
from app.api.openai.responses_items import InputItem
from app.api.store.entries import Birth, Seen, StoreConflictError, Stored
from app.api.store.tenant_store import TenantStore
from app.config.limits import RequestLimits
from app.errors import InvalidRequestError

PREFIX = "resp_"  # of ids: the store has entries of other kinds, too
ENDED = frozenset({"completed", "incomplete", "failed", "cancelled"})
READ_S_PER_BYTE = 5 * PARSE_S_PER_BYTE  # JSON into objects, and those into items
_ITEMS: TypeAdapter[list[InputItem]] = TypeAdapter(list[InputItem])


class ResponseNotFoundError(InvalidRequestError):
    """No response is kept under this id for this tenant."""

    status = 404
    code = "response_not_found"


class ItemNotFoundError(InvalidRequestError):
    """No item is kept under this id for this tenant."""

    status = 404
    code = "item_not_found"


class PreviousResponseNotFoundError(InvalidRequestError):
    """The response to be continued, or one before it, is not kept."""

    code = "previous_response_not_found"


class ResponseStore:
    """The kept responses; a conversation is bounded as if it had come in one body."""

    def __init__(self, store: TenantStore, limits: RequestLimits) -> None:
        self.entries = store
        self._limits = limits

    async def keep(
        self, tenant: str, response: dict[str, Any], asked: bytes, events: Sequence[bytes] = (), **options: Any
    ) -> int:
        """Keep a response and the JSON of the items that it was asked; its version. `options` are LocalStore.put's."""
        header, previous = json.dumps(response).encode(), response["previous_response_id"]
        append = [asked, *events]
        return await self.entries.put(tenant, response["id"], header, append=append, born=Birth(previous), **options)

    async def find(self, tenant: str, response_id: str) -> Stored:
        """A response; ResponseNotFoundError when it is not kept. One that lost its server has failed."""
        while True:
            stored = await self.entries.get(tenant, response_id) if response_id.startswith(PREFIX) else None
            if stored is None:
                raise not_found(response_id)
            if not stored.is_lost:
                return stored
            error = {"code": "server_error", "message": "the server that made this response is gone"}
            await self.end(tenant, stored, json.loads(stored.header) | {"status": "failed", "error": error})

    async def end(self, tenant: str, stored: Stored, response: dict[str, Any]) -> bool:
        """Replace an unfinished response by its end, with the event that says so; False when it has changed since."""
        event = event_text(f"response.{response['status']}", max(0, stored.num_chunks - 1), response=response)
        header = json.dumps(response).encode()
        try:
            seen = Seen(stored.version, stored.num_chunks)
            await self.entries.put(tenant, stored.key, header, append=[utf8(event)], seen=seen)
        except StoreConflictError:
            return False
        return True

    async def input_items(self, work: RequestWork, tenant: str, response_id: str) -> list[dict[str, Any]]:
        """Returns the items that a response was asked with."""
        await self.find(tenant, response_id)
        chunks = await self.entries.read(tenant, response_id, 0, 1)
        if not chunks:
            raise not_found(response_id)
        items: list[dict[str, Any]] = await work.run(len(chunks[0]) * READ_S_PER_BYTE, json.loads, chunks[0])
        return items

    async def parts(self, tenant: str, response_id: str) -> tuple[bytes, ...]:
        """The conversation that a response ends, as JSON: what was asked and the response that came, by turns."""
        limits = self._limits
        bounds = limits.max_messages, limits.max_body_bytes
        chain = await self.entries.chain(tenant, response_id, *bounds) if response_id.startswith(PREFIX) else []
        if not chain:
            raise PreviousResponseNotFoundError(
                f"the response {response_id!r}, or one before it, is not kept", param="previous_response_id"
            )
        if chain[0][0].previous is not None:
            raise InvalidRequestError(
                f"the conversation has more than {limits.max_messages} responses or {limits.max_body_bytes} bytes",
                param="previous_response_id",
            )
        return tuple(part for stored, asked in chain for part in (asked, stored.header))

    async def items(self, work: RequestWork, tenant: str, ids: Sequence[str]) -> dict[str, InputItem]:
        """Items of kept responses by their ids. ItemNotFoundError names one that is not kept."""
        of_response: dict[str, list[str]] = {}
        for item_id in ids:
            of_response.setdefault(response_of(item_id) or "", []).append(item_id)
        found: dict[str, InputItem] = {}
        left = self._limits.max_body_bytes
        for response_id, own in of_response.items():
            stored = await self.entries.get(tenant, response_id)
            asked = await self.entries.read(tenant, response_id, 0, 1) if stored is not None else None
            if stored is None or not asked:
                raise _no_item(own[0])
            left -= len(stored.header) + len(asked[0])
            if left < 0:
                raise InvalidRequestError(
                    f"the responses of these items have more than {self._limits.max_body_bytes} bytes", param="input"
                )
            cost_s = (len(stored.header) + len(asked[0])) * READ_S_PER_BYTE
            found |= await work.run(cost_s, _items_of, asked[0], stored.header, own)
        return found

    async def delete(self, tenant: str, response_id: str) -> bool:
        """Forget a response; False when it was not kept. What works on it ends."""
        return response_id.startswith(PREFIX) and await self.entries.delete(tenant, response_id)


def not_found(response_id: str) -> ResponseNotFoundError:
    """The refusal of an id that names nothing."""
    return ResponseNotFoundError(f"no response is kept under the id {response_id[:256]!r}", param="response_id")


def _no_item(item_id: str) -> ItemNotFoundError:
    return ItemNotFoundError(f"no item is kept under the id {item_id!r}", param="input")


def _items_of(asked: bytes, response: bytes, ids: Sequence[str]) -> dict[str, InputItem]:
    """Some items of one response, which is input and header."""
    items = {item["id"]: item for item in [*json.loads(asked), *json.loads(response)["output"]]}
    if missing := [item_id for item_id in ids if item_id not in items]:
        raise _no_item(missing[0])
    return dict(zip(ids, _ITEMS.validate_python([items[item_id] for item_id in ids]), strict=True))


async def conversation(work: RequestWork, parts: Sequence[bytes]) -> list[InputItem]:
    """The items of responses that follow each other, of which `parts` are input and response by turns."""
    return await work.run(sum(map(len, parts)) * READ_S_PER_BYTE, _conversation, parts)


def _conversation(parts: Sequence[bytes]) -> list[InputItem]:
    items: list[dict[str, Any]] = []
    for asked, response in zip(*[map(json.loads, parts)] * 2, strict=True):
        if response["status"] not in ("completed", "incomplete"):
            raise InvalidRequestError(
                f"the response {response['id']!r} is {response['status']}", param="previous_response_id"
            )
        items += [*asked, *response["output"]]
    return _ITEMS.validate_python(items)
