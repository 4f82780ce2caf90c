"""The store as the HTTP routes use it: awaited, and the same for every ingress replica."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Protocol, cast

from app.api.store.entries import Stored, Tail
from app.api.store.local_store import LocalStore
from app.errors import EngineDeadError

PATIENCE_S = 60.0  # how long work that nobody waits for asks a store that does not answer
FIRST_WAIT_S, LONGEST_WAIT_S = 0.1, 5.0


class Ask(Protocol):
    """Calls a method of a LocalStore, wherever that is; raises what it raises."""

    async def __call__(self, method: str, *arguments: Any, **named: Any) -> Any:
        """The method's result."""
        ...


def ask_local(store: LocalStore) -> Ask:
    """Asks a store of this process: enough where there is one ingress replica."""

    async def ask(method: str, *arguments: Any, **named: Any) -> Any:
        return getattr(store, method)(*arguments, **named)

    return ask


def ask_patiently(ask: Ask) -> Ask:
    """Asks again while the store does not answer, up to PATIENCE_S from the first time.

    For calls that may be done twice: all but a `put` without version and an `append` without `at`.
    """

    async def ask_again(method: str, *arguments: Any, **named: Any) -> Any:
        deadline, wait_s = None, FIRST_WAIT_S
        while True:
            try:
                return await ask(method, *arguments, **named)
            except EngineDeadError:
                now = asyncio.get_running_loop().time()
                deadline = deadline or now + PATIENCE_S
                if now + wait_s > deadline:
                    raise
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, LONGEST_WAIT_S)

    return ask_again


class TenantStore:
    """A LocalStore that may be elsewhere: the same methods, awaited. EngineDeadError when it does not answer."""

    def __init__(self, ask: Ask) -> None:
        self._ask = ask

    def patient(self) -> TenantStore:
        """The same store for work that nobody waits for; see `ask_patiently`."""
        return TenantStore(ask_patiently(self._ask))

    async def put(self, tenant: str, key: str, header: bytes, **options: Any) -> int:
        """See LocalStore.put."""
        return cast(int, await self._ask("put", tenant, key, header, **options))

    async def append(self, tenant: str, key: str, chunks: Sequence[bytes], owner: str, at: int | None = None) -> int:
        """See LocalStore.append."""
        return cast(int, await self._ask("append", tenant, key, chunks, owner, at))

    async def join(self, tenant: str, key: str, header: bytes, parts: Sequence[str], owner: str, **options: Any) -> int:
        """See LocalStore.join."""
        return cast(int, await self._ask("join", tenant, key, header, parts, owner, **options))

    async def renew(self, tenant: str, key: str, owner: str, lease_s: float) -> int:
        """See LocalStore.renew."""
        return cast(int, await self._ask("renew", tenant, key, owner, lease_s))

    async def take(self, tenant: str, key: str, owner: str, lease_s: float) -> Stored | None:
        """See LocalStore.take."""
        return cast(Stored | None, await self._ask("take", tenant, key, owner, lease_s))

    async def claim(self, owner: str, lease_s: float) -> tuple[str, Stored] | None:
        """See LocalStore.claim."""
        return cast(tuple[str, Stored] | None, await self._ask("claim", owner, lease_s))

    async def get(self, tenant: str, key: str) -> Stored | None:
        """See LocalStore.get."""
        return cast(Stored | None, await self._ask("get", tenant, key))

    async def read(self, tenant: str, key: str, start: int, max_bytes: int = 4 << 20) -> list[bytes] | None:
        """See LocalStore.read."""
        return cast(list[bytes] | None, await self._ask("read", tenant, key, start, max_bytes))

    async def tail(self, tenant: str, key: str, start: int, max_bytes: int = 4 << 20) -> Tail | None:
        """See LocalStore.tail."""
        return cast(Tail | None, await self._ask("tail", tenant, key, start, max_bytes))

    async def chain(self, tenant: str, key: str, max_entries: int, max_bytes: int) -> list[tuple[Stored, bytes]]:
        """See LocalStore.chain."""
        return cast(list[tuple[Stored, bytes]], await self._ask("chain", tenant, key, max_entries, max_bytes))

    async def page(
        self, tenant: str, after: str | None, limit: int, newest_first: bool, **options: Any
    ) -> list[Stored]:
        """See LocalStore.page."""
        return cast(list[Stored], await self._ask("page", tenant, after, limit, newest_first, **options))

    async def check_room(self, tenant: str, num_bytes: int) -> None:
        """See LocalStore.check_room."""
        await self._ask("check_room", tenant, num_bytes)

    async def size(self) -> tuple[int, int]:
        """See LocalStore.size."""
        return cast(tuple[int, int], await self._ask("size"))

    async def delete(self, tenant: str, key: str) -> bool:
        """See LocalStore.delete."""
        return cast(bool, await self._ask("delete", tenant, key))
