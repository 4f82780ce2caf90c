"""Turns of pieces: in order, bounded, and as many as there is memory for, but never none."""

from __future__ import annotations

import asyncio

from app.api.http.held_bytes import HeldBytes
from app.api.openai.audio.turns import Turns
from tests import limits


async def _taken(turns: Turns, count: int) -> list[asyncio.Task[None]]:
    tasks = [asyncio.create_task(turns.take()) for _ in range(count)]
    for _ in range(3):
        await asyncio.sleep(0)
    return tasks


def _done(tasks: list[asyncio.Task[None]]) -> list[bool]:
    return [task.done() for task in tasks]


def test_as_many_as_may_run() -> None:
    async def run() -> None:
        held = HeldBytes(1 << 20)
        turns = Turns(2, held.begin({}, "t"), 100)
        tasks = await _taken(turns, 4)
        assert _done(tasks) == [True, True, False, False]
        assert held.total == 200
        turns.give_back()
        await tasks[2]
        assert _done(tasks) == [True, True, True, False]
        turns.give_back()
        await tasks[3]
        turns.give_back()
        turns.give_back()
        assert held.total == 0

    limits.run(run())


def test_as_many_as_there_is_memory_for() -> None:
    async def run() -> None:
        held = HeldBytes(1_000)  # half of it a tenant's
        turns = Turns(32, held.begin({}, "t"), 200)
        tasks = await _taken(turns, 4)
        assert _done(tasks) == [True, True, False, False]
        other = held.begin({}, "t")
        other.take(400)
        turns.give_back()
        for _ in range(3):
            await asyncio.sleep(0)
        assert _done(tasks) == [True, True, False, False], "what is held leaves no room for a second one"
        turns.give_back()
        await tasks[2]  # the only one, which never waits for memory
        assert held.total == 600

    limits.run(run())
