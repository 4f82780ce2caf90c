"""Stores as an actor elsewhere is: every call yields, and some fail, done or not."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Literal

from app.api.store.kinds import Stores, store_limits
from app.api.store.local_store import LocalStore
from app.api.store.tenant_store import TenantStore
from app.config.ingress import IngressConfig
from app.errors import EngineDeadError

Fate = Literal["", "undone", "done"]  # what a call meets: it answers, or fails before or after it was done
Fates = Callable[[str, str], Fate]  # by kind and method


def shaky_stores(ingress: IngressConfig, fates: Fates) -> Stores:
    """Local stores whose calls fail as `fates` says."""
    stores = {
        kind: TenantStore(_ask(kind, LocalStore(limits), fates)) for kind, limits in store_limits(ingress).items()
    }
    return stores.__getitem__


def _ask(kind: str, store: LocalStore, fates: Fates) -> Any:
    async def ask(method: str, *arguments: Any, **named: Any) -> Any:
        await asyncio.sleep(0)
        fate = fates(kind, method)
        answer = getattr(store, method)(*arguments, **named) if fate != "undone" else None
        await asyncio.sleep(0)
        if fate:
            raise EngineDeadError("the store does not answer")
        return answer

    return ask


class Nth:
    """Every call answers, but the `n`-th of those that `counts`."""

    def __init__(self, n: int, fate: Fate, counts: Fates | None = None) -> None:
        self.n, self.fate, self.num_calls = n, fate, 0
        self._counts = counts

    def __call__(self, kind: str, method: str) -> Fate:
        if self._counts is not None and not self._counts(kind, method):
            return ""
        self.num_calls += 1
        return self.fate if self.num_calls == self.n else ""
