"""The limit on an answer follows the answers before it, and not this process's own stalls."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from app.deployments.ingress import answer_limit
from app.deployments.ingress.answer_limit import HALF_LIFE_S, LONGEST, SLICES, AnswerLimit
from tests.limits import async_pause, patience_s, pause, run


def test_it_follows_the_slowest_of_late_and_forgets(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr(answer_limit, "time", SimpleNamespace(monotonic=lambda: now_s))
    limit = AnswerLimit(0.05)
    assert limit.seconds == 0.05
    for took_s in (0.001, 0.12, 0.002):
        limit.learn(took_s)
    assert limit.seconds == pytest.approx(0.24)
    limit.learn(30.0)
    assert limit.seconds == LONGEST * 0.05
    now_s += 40 * HALF_LIFE_S
    assert limit.seconds == 0.05
    limit.learn(0.03)
    assert limit.seconds == pytest.approx(0.06)


def test_who_waits_hears_of_what_others_took() -> None:
    async def main() -> None:
        answer = asyncio.get_running_loop().create_future()

        async def ask() -> None:
            await answer

        limit = AnswerLimit(0.05)
        asked = asyncio.create_task(ask())
        waiting = asyncio.create_task(limit.wait(asked))
        await asyncio.sleep(0)
        limit.learn(patience_s())
        limit._least_s = patience_s()
        for _ in range(SLICES + 1):
            await async_pause(0.02)
        assert not waiting.done()
        answer.set_result(None)
        assert await waiting

    run(main())


def test_a_stall_of_ones_own_counts_once() -> None:
    async def main() -> None:
        answer = asyncio.get_running_loop().create_future()

        async def ask() -> None:
            await answer

        limit = AnswerLimit(0.5)
        asked = asyncio.create_task(ask())
        waiting = asyncio.create_task(limit.wait(asked))
        await asyncio.sleep(0)
        pause(0.5 + 0.5 / SLICES)  # longer than the limit
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not waiting.done()
        answer.set_result(None)
        assert await waiting

    run(main())
