"""Responses that are kept for later: `previous_response_id`, GET and DELETE of /v1/responses/{id}.

A record belongs to the tenant that made it; nobody else finds it. The store is bounded in number and bytes and forgets
what was not used for longest; using a response uses all the responses before it, so a conversation stays whole.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Protocol


@dataclass(slots=True, frozen=True)
class StoredResponse:
    """One kept response. `data` is JSON: the response and the items of its input."""

    response_id: str
    data: bytes
    previous_id: str | None = None


class ResponseStore(Protocol):
    """Where responses are kept; every ingress replica sees the same ones."""

    async def put(self, tenant: str, record: StoredResponse) -> None:
        """Keep a response."""
        ...

    async def chain(self, tenant: str, response_id: str) -> list[StoredResponse]:
        """The response and those before it, the oldest first; [] when it, or one before it, is not kept."""
        ...

    async def get(self, tenant: str, response_id: str) -> StoredResponse | None:
        """One response; None when it is not kept."""
        ...

    async def delete(self, tenant: str, response_id: str) -> bool:
        """Forget a response; False when it was not kept."""
        ...


class ResponseShelf:
    """The records of one process, synchronously; what every store is made of."""

    def __init__(self, max_responses: int, max_bytes: int) -> None:
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._records: OrderedDict[tuple[str, str], StoredResponse] = OrderedDict()  # the longest unused first
        self._num_bytes = 0

    def __len__(self) -> int:
        return len(self._records)

    def put(self, tenant: str, record: StoredResponse) -> None:
        """Keep a record; forget others to make room. One that is larger than the whole shelf is not kept."""
        self.delete(tenant, record.response_id)
        if len(record.data) > self._max_bytes or not self._max_responses:
            return
        self._records[tenant, record.response_id] = record
        self._num_bytes += len(record.data)
        while len(self._records) > self._max_responses or self._num_bytes > self._max_bytes:
            _, oldest = self._records.popitem(last=False)
            self._num_bytes -= len(oldest.data)

    def chain(self, tenant: str, response_id: str) -> list[StoredResponse]:
        """See ResponseStore.chain."""
        records: list[StoredResponse] = []
        wanted: str | None = response_id
        while wanted is not None:
            record = self._records.get((tenant, wanted))
            if record is None:
                return []
            records.append(record)
            wanted = record.previous_id
        for record in records:
            self._records.move_to_end((tenant, record.response_id))
        return records[::-1]

    def get(self, tenant: str, response_id: str) -> StoredResponse | None:
        """See ResponseStore.get."""
        return self._records.get((tenant, response_id))

    def delete(self, tenant: str, response_id: str) -> bool:
        """See ResponseStore.delete."""
        record = self._records.pop((tenant, response_id), None)
        if record is None:
            return False
        self._num_bytes -= len(record.data)
        return True


class MemoryResponseStore:
    """A ResponseStore of one process: enough where there is one ingress replica."""

    def __init__(self, max_responses: int, max_bytes: int) -> None:
        self._shelf = ResponseShelf(max_responses, max_bytes)

    async def put(self, tenant: str, record: StoredResponse) -> None:
        """See ResponseStore.put."""
        self._shelf.put(tenant, record)

    async def chain(self, tenant: str, response_id: str) -> list[StoredResponse]:
        """See ResponseStore.chain."""
        return self._shelf.chain(tenant, response_id)

    async def get(self, tenant: str, response_id: str) -> StoredResponse | None:
        """See ResponseStore.get."""
        return self._shelf.get(tenant, response_id)

    async def delete(self, tenant: str, response_id: str) -> bool:
        """See ResponseStore.delete."""
        return self._shelf.delete(tenant, response_id)
