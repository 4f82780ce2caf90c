"""Kept responses of the whole application: one small actor that every ingress replica asks.

It is made when the first response is kept. It lives in memory: if its node is lost, earlier responses are gone, and a
request that names one is told so.
"""

from __future__ import annotations

import asyncio
from typing import Any

import ray

from app.api.response_store import ResponseShelf, StoredResponse
from app.config import IngressConfig
from app.errors import EngineDeadError

NAMESPACE = "manta"
TIMEOUT_S = 10.0


class ResponseStoreActor:
    """The shelf, in an actor of its own."""

    def __init__(self, max_responses: int, max_bytes: int) -> None:
        self._shelf = ResponseShelf(max_responses, max_bytes)

    def put(self, tenant: str, record: StoredResponse) -> None:
        """See ResponseStore.put."""
        self._shelf.put(tenant, record)

    def chain(self, tenant: str, response_id: str) -> list[StoredResponse]:
        """See ResponseStore.chain."""
        return self._shelf.chain(tenant, response_id)

    def get(self, tenant: str, response_id: str) -> StoredResponse | None:
        """See ResponseStore.get."""
        return self._shelf.get(tenant, response_id)

    def delete(self, tenant: str, response_id: str) -> bool:
        """See ResponseStore.delete."""
        return self._shelf.delete(tenant, response_id)


class SharedResponseStore:
    """A ResponseStore over the actor of an application. EngineDeadError when the actor does not answer."""

    def __init__(self, application: str, config: IngressConfig) -> None:
        self._name = f"responses-{application}"
        self._limits = (config.max_stored_responses, config.max_stored_bytes)
        self._actor: Any = None

    async def put(self, tenant: str, record: StoredResponse) -> None:
        """See ResponseStore.put."""
        await self._call("put", tenant, record)

    async def chain(self, tenant: str, response_id: str) -> list[StoredResponse]:
        """See ResponseStore.chain."""
        records: list[StoredResponse] = await self._call("chain", tenant, response_id)
        return records

    async def get(self, tenant: str, response_id: str) -> StoredResponse | None:
        """See ResponseStore.get."""
        record: StoredResponse | None = await self._call("get", tenant, response_id)
        return record

    async def delete(self, tenant: str, response_id: str) -> bool:
        """See ResponseStore.delete."""
        return bool(await self._call("delete", tenant, response_id))

    async def _call(self, method: str, *arguments: Any) -> Any:
        """Ask the actor; one that has died is made again, once."""
        for is_last in (False, True):
            try:
                if self._actor is None:
                    self._actor = await asyncio.to_thread(self._find)
                return await asyncio.wait_for(getattr(self._actor, method).remote(*arguments), TIMEOUT_S)
            except (ray.exceptions.RayError, TimeoutError) as error:
                self._actor = None
                if is_last or isinstance(error, TimeoutError):
                    raise EngineDeadError(f"the store of responses does not answer ({type(error).__name__})") from error

    def _find(self) -> Any:
        """The actor; whoever asks first makes it."""
        actor = ray.remote(ResponseStoreActor).options(
            name=self._name,
            namespace=NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            num_cpus=0,
            max_restarts=-1,
        )
        return actor.remote(*self._limits)
