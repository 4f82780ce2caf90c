"""Tenants share the turns of batches."""

from __future__ import annotations

import asyncio

from app.api.batches.turns import Turns
from tests import limits


def test_a_tenant_gets_its_share_once_another_waits() -> None:
    async def go() -> None:
        turns = Turns(4)
        for _ in range(4):
            await turns.acquire("a")  # alone it may have all
        many = [asyncio.create_task(turns.acquire("a")) for _ in range(10)]
        late = [asyncio.create_task(turns.acquire("b")) for _ in range(2)]
        await asyncio.sleep(0)
        for _ in range(2):
            turns.release("a")
        await asyncio.gather(*late)  # though ten of the other have waited longer
        assert not any(task.done() for task in many)
        for _ in range(2):
            turns.release("b")
        await asyncio.wait(many, return_when=asyncio.FIRST_COMPLETED)
        for task in many:
            task.cancel()
        await asyncio.gather(*many, return_exceptions=True)

    limits.run(go())
