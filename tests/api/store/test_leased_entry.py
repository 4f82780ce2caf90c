"""The beat of work under a lease, over a store that fails; its users under faults: batches/, idempotency/, openai/."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from app.api.store.entries import Lease, StoreConflictError
from app.api.store.leased_entry import LeasedEntry
from app.api.store.tenant_store import TenantStore
from app.errors import EngineDeadError
from tests import limits


class Store:
    """Answers a renewal with the next of `answers`."""

    def __init__(self, *answers: Exception | None) -> None:
        self.answers = list(answers)
        self.asked: list[tuple[Any, ...]] = []

    async def renew(self, *arguments: Any) -> None:
        self.asked.append(arguments)
        answer = self.answers.pop(0)
        if answer is not None:
            raise answer


def leased(store: Store) -> LeasedEntry:
    return LeasedEntry(cast(TenantStore, store), "tenant", "key", Lease("me", 0.004))


def test_a_store_that_does_not_answer_is_asked_again_and_a_lost_entry_is_told_once() -> None:
    async def scene() -> None:
        store = Store(None, EngineDeadError("no store"), None, StoreConflictError("another's"))
        entry, lost = leased(store), asyncio.Event()
        before = asyncio.all_tasks()
        with entry.beating(entry.renew, lost.set):
            await asyncio.wait_for(lost.wait(), limits.patience_s())
            assert store.asked == [("tenant", "key", "me", 0.004)] * 4
            assert asyncio.all_tasks() == before, "it beats on for an entry that is another's"

    limits.run(scene())


def test_the_beat_ends_with_the_work() -> None:
    async def scene() -> None:
        entry, before = leased(Store()), asyncio.all_tasks()
        with entry.beating(entry.renew, lambda: None):
            (beat,) = asyncio.all_tasks() - before
        await asyncio.wait([beat])
        assert beat.cancelled()

    limits.run(scene())
