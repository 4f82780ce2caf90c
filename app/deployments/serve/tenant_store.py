"""Keeps what tenants leave, for the whole application: one small actor that every ingress replica asks.

It is made when it is first asked. It lives in memory: if its node is lost, what was kept is gone, and a request that
names it is told so. No call is part of an HTTP request (see own_context), so a client that leaves ends none.

An outage costs the requests that meet its beginning TIMEOUT_S, and those that come later nothing: they are told at
once, until a look in the background has found the store again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

import ray

from app.api.store.entries import StoreUnavailableError
from app.api.store.kinds import Stores, store_limits
from app.api.store.local_store import LocalStore
from app.api.store.tenant_store import TenantStore
from app.config.ingress import IngressConfig
from app.deployments.channel.own_context import start_outside
from app.errors import MantaError
from app.heap import map_large_blocks

NAMESPACE = "manta"
TIMEOUT_S = 10.0
SIZE_S = 1.0  # the same for its size, which a scrape waits for
FIRST_LOOK_S, LONGEST_LOOK_S = 0.25, 5.0  # between looks for a store that did not answer

logger = logging.getLogger("manta.ingress")


class TenantStoreActor:
    """A store of each kind, in an actor of its own. Its methods do not wait, so each runs alone."""

    def __init__(self, ingress: IngressConfig) -> None:
        map_large_blocks()
        self._stores = {kind: LocalStore(limits) for kind, limits in store_limits(ingress).items()}

    async def ask(self, kind: str, method: str, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Call a method of a LocalStore. What it raises on purpose is the result: Ray would wrap the error.

        Asynchronous, as Ray starts such calls in any order: where a caller's calls have to start in theirs, one that
        was cancelled on its way holds up all that follow.
        """
        try:
            return getattr(self._stores[kind], method)(*arguments, **named)
        except MantaError as error:
            return error

    async def ping(self) -> None:
        """Answer."""


class SharedStores:
    """The actor of an application. StoreUnavailableError when it does not answer."""

    def __init__(
        self,
        application: str,
        ingress: IngressConfig,
        timeout_s: float = TIMEOUT_S,
        find: Callable[[], Any] | None = None,
    ) -> None:
        """`find`: finds or makes the actor; it may block."""
        self._name = f"tenant-store-{application}"
        self._ingress = ingress
        self._timeout_s = timeout_s
        self._find = find or self._find_by_name
        self._finding: asyncio.Task[Any] | None = None
        self._actor: Any = None
        self._is_out = False

    @property
    def is_out(self) -> bool:
        """True if the store did not answer when it was asked last."""
        return self._is_out

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

    async def sizes(self) -> dict[str, tuple[int, int]]:
        """The entries and bytes of each kind; {} where nothing was kept yet, or the store does not answer."""
        if self._actor is None or self._is_out:
            return {}
        kinds, store = store_limits(self._ingress), self.stores()
        try:
            async with asyncio.timeout(SIZE_S):
                sizes = await asyncio.gather(*(store(kind).size() for kind in kinds))
        except (MantaError, TimeoutError):
            return {}
        return dict(zip(kinds, sizes, strict=True))

    async def exists(self) -> bool:
        """True if anything was kept yet: asking for it makes the actor."""
        if self._actor is None:
            try:
                await asyncio.to_thread(ray.get_actor, self._name, NAMESPACE)
            except ValueError:
                return False
        return True

    async def _call(self, *arguments: Any) -> Any:
        """Ask the actor, unless it did not answer when it was asked last."""
        if self._is_out:
            raise StoreUnavailableError
        asking = start_outside(asyncio.wait_for(self._ask(arguments), self._timeout_s))
        try:
            return await asyncio.shield(asking)
        except ray.exceptions.RayTaskError:
            raise  # it has answered
        except (ray.exceptions.RayError, TimeoutError) as error:
            self._begin_outage(error)
            raise StoreUnavailableError from error

    async def _ask(self, arguments: tuple[Any, ...]) -> Any:
        """The answer; an actor that has died is made again, once."""
        for is_last in (False, True):
            actor = await self._reach()
            try:
                return await actor.ask.remote(*arguments)
            except ray.exceptions.RayError as error:
                self._let_go(actor)
                if is_last or isinstance(error, ray.exceptions.RayTaskError):
                    raise

    async def _reach(self) -> Any:
        """The handle of the actor, which is looked for once at a time: the call to Ray may hang."""
        if self._actor is None:
            if self._finding is None or self._finding.done():
                self._finding = start_outside(asyncio.to_thread(self._find))
            self._actor = await asyncio.shield(self._finding)
        return self._actor

    def _let_go(self, actor: Any) -> None:
        if self._actor is actor:  # else somebody has found another one meanwhile
            self._actor = None

    # ---- outages

    def _begin_outage(self, error: BaseException) -> None:
        if self._is_out:
            return
        self._is_out = True
        logger.warning(
            "the store of tenants does not answer (%s): until it does, nothing is kept, and what needs it is refused",
            type(error).__name__,
        )
        start_outside(self._look())

    async def _look(self) -> None:
        """Look for the store until it answers, with a new handle each time."""
        began, wait_s = time.monotonic(), FIRST_LOOK_S
        while True:
            self._let_go(self._actor)
            try:
                await asyncio.wait_for(self._ping(), self._timeout_s)
            except Exception:  # whatever it is: who ends here leaves the store out for good
                await asyncio.sleep(wait_s)
                wait_s = min(2 * wait_s, LONGEST_LOOK_S)
            else:
                self._is_out = False
                logger.warning("the store of tenants answers again, after %.1f s", time.monotonic() - began)
                return

    async def _ping(self) -> None:
        await (await self._reach()).ping.remote()

    def _find_by_name(self) -> Any:
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
