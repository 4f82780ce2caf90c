"""What tenants keep, for the whole application: one small actor that every ingress replica asks.

It is made when it is first asked. It lives in memory: if its node is lost, what was kept is gone, and a request that
names it is told so.
"""

from __future__ import annotations

import asyncio
from typing import Any

import ray

from app.api.store.kinds import Stores, store_limits
from app.api.store.local_store import LocalStore
from app.api.store.tenant_store import TenantStore
from app.config import IngressConfig
from app.errors import EngineDeadError, MantaError

NAMESPACE = "manta"
TIMEOUT_S = 10.0


class TenantStoreActor:
    """A store of each kind, in an actor of its own."""

    def __init__(self, ingress: IngressConfig) -> None:
        self._stores = {kind: LocalStore(limits) for kind, limits in store_limits(ingress).items()}

    def ask(self, kind: str, method: str, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Call a method of a LocalStore. What it raises on purpose is the result: Ray would wrap the error."""
        try:
            return getattr(self._stores[kind], method)(*arguments, **named)
        except MantaError as error:
            return error


class SharedStores:
    """The actor of an application. EngineDeadError when it does not answer."""

    def __init__(self, application: str, ingress: IngressConfig) -> None:
        self._name = f"tenant-store-{application}"
        self._ingress = ingress
        self._actor: Any = None

    def stores(self) -> Stores:
        """The store of each kind."""

        def store(kind: str) -> TenantStore:
            async def ask(method: str, *arguments: Any, **named: Any) -> Any:
                answer = await self._call(kind, method, arguments, named)
                if isinstance(answer, MantaError):
                    raise answer
                return answer

            return TenantStore(ask)

        return store

    async def exists(self) -> bool:
        """Whether anything was kept yet: asking for it makes the actor."""
        if self._actor is None:
            try:
                await asyncio.to_thread(ray.get_actor, self._name, NAMESPACE)
            except ValueError:
                return False
        return True

    async def _call(self, *arguments: Any) -> Any:
        """Ask the actor; one that has died is made again, once."""
        for is_last in (False, True):
            try:
                if self._actor is None:
                    self._actor = await asyncio.to_thread(self._find)
                return await asyncio.wait_for(self._actor.ask.remote(*arguments), TIMEOUT_S)
            except (ray.exceptions.RayError, TimeoutError) as error:
                self._actor = None
                if is_last or isinstance(error, TimeoutError):
                    raise EngineDeadError(f"the store does not answer ({type(error).__name__})") from error

    def _find(self) -> Any:
        """The actor; whoever asks first makes it."""
        actor = ray.remote(TenantStoreActor).options(
            name=self._name,
            namespace=NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            num_cpus=0,
            max_restarts=-1,
        )
        return actor.remote(self._ingress)
