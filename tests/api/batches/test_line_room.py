"""Room for lines of batches: bounded in all and of a tenant, and nobody waits for ever."""

from __future__ import annotations

import asyncio

from app.api.batches.line_room import LineRoom
from tests import limits


def test_who_finds_no_room_waits() -> None:
    async def go() -> None:
        room = LineRoom(100)
        await room.acquire("a", 500)  # alone, it may
        waiting = [asyncio.create_task(room.acquire(*one)) for one in (("a", 10), ("b", 40), ("b", 20), ("c", 50))]
        await limits.async_pause(0.01)
        assert not any(task.done() for task in waiting)
        room.release("a", 500)
        await limits.until(lambda: sum(task.done() for task in waiting) == 3)
        assert [task.done() for task in waiting] == [True, True, False, True]
        assert room.total == 100
        room.release("b", 40)
        await limits.until(waiting[2].done)
        for tenant, num_bytes in (("a", 10), ("b", 20), ("c", 50)):
            room.release(tenant, num_bytes)
        assert room.total == 0

    limits.run(go())
