"""Questions that come while a call is under way travel together; each has its own answer, or its own end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from app.deployments.channel.own_context import start_outside
from app.deployments.ingress import router_calls
from app.deployments.ingress.router_calls import MOST_HASHES, MOST_QUESTIONS, RouterCalls
from app.deployments.router.question import Question
from app.deployments.routing.policies.base import Decision
from app.records.block_hash import HASH_BYTES
from tests.limits import run, until


class Router:
    """Each call is answered once it is let."""

    def __init__(self) -> None:
        self.calls: list[tuple[list[Question], asyncio.Future[list[Decision]]]] = []
        self.num_left = 0

    async def remote(self, questions: list[Question]) -> list[Decision]:
        answer: asyncio.Future[list[Decision]] = asyncio.get_running_loop().create_future()
        self.calls.append((questions, answer))
        try:
            return await answer
        except asyncio.CancelledError:
            self.num_left += 1
            raise

    def asked(self, call: int) -> list[int]:
        return [question.num_prompt_tokens for question in self.calls[call][0]]

    def answer(self, call: int) -> None:
        self.calls[call][1].set_result([Decision(str(number)) for number in self.asked(call)])


def question(number: int, num_hashes: int = 0) -> Question:
    return Question("m", number, 1, bytes(num_hashes * HASH_BYTES))


def when(router: Router, count: int) -> Callable[[], bool]:
    return lambda: len(router.calls) == count


async def all_begun() -> None:
    """Until a call that begins now is at a Router of its own: one that began before is at its Router, too."""
    other = Router()
    asked = RouterCalls(other).ask(question(0))
    await until(when(other, 1))
    other.answer(0)
    await asked.answer


def test_those_that_come_meanwhile_travel_together() -> None:
    async def scene() -> None:
        router = Router()
        calls = RouterCalls(router)
        first = calls.ask(question(0))
        await until(when(router, 1))
        others = [calls.ask(question(number)) for number in (1, 2, 3)]
        others.pop(1).answer.cancel()
        router.answer(0)
        assert await first.answer == Decision("0")
        await until(when(router, 2))
        assert router.asked(1) == [1, 3]
        router.answer(1)
        assert [await one.answer for one in others] == [Decision("1"), Decision("3")]
        last = calls.ask(question(4))
        await until(when(router, 3))
        router.answer(2)
        assert await last.answer == Decision("4")

    run(scene())


@pytest.mark.parametrize(
    ("hashes", "sizes"),
    [
        ([0] * (2 * MOST_QUESTIONS + 3), [MOST_QUESTIONS, MOST_QUESTIONS, 3]),
        ([MOST_HASHES // 2] * 5, [2, 2, 1]),
        ([1, MOST_HASHES + 1, MOST_HASHES + 1, 1, 1], [1, 1, 1, 2]),
    ],
    ids=["many", "long", "too long"],
)
def test_a_call_carries_no_more_than_the_router_answers_in_time(hashes: list[int], sizes: list[int]) -> None:
    async def scene() -> None:
        router = Router()
        calls = RouterCalls(router)
        asked = [calls.ask(question(number, size)) for number, size in enumerate(hashes)]
        for call in range(len(sizes)):
            await until(when(router, call + 1))
            router.answer(call)
        assert [await one.answer for one in asked] == [Decision(str(number)) for number in range(len(hashes))]
        assert [len(questions) for questions, _ in router.calls] == sizes
        assert [one for call in range(len(sizes)) for one in router.asked(call)] == list(range(len(hashes)))

    run(scene())


def test_a_call_that_fails_as_a_whole_is_the_answer_to_all_in_it_and_to_no_other() -> None:
    async def scene() -> None:
        router = Router()
        calls = RouterCalls(router)
        both = [calls.ask(question(number)) for number in (0, 1)]
        await until(when(router, 1))
        next_one = calls.ask(question(2))
        router.calls[0][1].set_exception(RuntimeError("no Router"))
        for one in both:
            with pytest.raises(RuntimeError, match="no Router"):
                await one.answer
        await until(when(router, 2))
        router.calls[1][1].set_result([])  # an answer too few
        with pytest.raises(ValueError, match="shorter"):
            await next_one.answer

    run(scene())


def test_nobody_waits_behind_a_call_that_is_passed_over() -> None:
    async def scene() -> None:
        router = Router()
        calls = RouterCalls(router)
        late = calls.ask(question(0))
        await until(when(router, 1))
        waiting = calls.ask(question(1))
        calls.pass_over(waiting)  # is not in the call under way
        await all_begun()
        assert len(router.calls) == 1
        calls.pass_over(late)
        await until(when(router, 2))
        router.answer(1)
        assert await waiting.answer == Decision("1")
        router.answer(0)
        assert await late.answer == Decision("0")

    run(scene())


def test_a_late_answer_begins_no_call_beside_the_one_under_way() -> None:
    async def scene() -> None:
        router = Router()
        calls = RouterCalls(router)
        late = calls.ask(question(0))
        await until(when(router, 1))
        calls.pass_over(late)
        asked = [calls.ask(question(1))]
        await until(when(router, 2))
        asked.append(calls.ask(question(2)))
        router.answer(0)
        assert await late.answer == Decision("0")
        await all_begun()
        assert len(router.calls) == 2
        router.answer(1)
        await until(when(router, 3))
        router.answer(2)
        assert [await one.answer for one in asked] == [Decision("1"), Decision("2")]

    run(scene())


def test_all_that_are_late_pass_their_call_over_once(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[asyncio.Task[None]] = []

    def start(work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        begun.append(start_outside(work))
        return begun[-1]

    monkeypatch.setattr(router_calls, "start_outside", start)

    async def scene() -> None:
        router = Router()
        calls = RouterCalls(router)
        both = [calls.ask(question(number)) for number in (0, 1)]
        await until(when(router, 1))
        waiting = calls.ask(question(2))
        for late in both:
            calls.pass_over(late)
        await until(when(router, 2))
        assert len(begun) == 2
        router.answer(1)
        assert await waiting.answer == Decision("2")
        await until(begun[1].done)
        assert calls._sent == []  # nothing holds an answer's request

    run(scene())


def test_a_call_goes_on_while_somebody_waits_for_it() -> None:
    async def scene() -> None:
        router = Router()
        calls = RouterCalls(router)
        left, stays = (calls.ask(question(number)) for number in (0, 1))
        await until(when(router, 1))
        is_told = asyncio.Event()
        left.answer.add_done_callback(lambda _: is_told.set())  # after the call's own
        left.answer.cancel()
        await is_told.wait()
        await all_begun()
        assert router.num_left == 0
        router.answer(0)
        assert await stays.answer == Decision("1")

    run(scene())


def test_a_call_ends_once_nobody_waits_for_it() -> None:
    async def scene() -> None:
        router = Router()
        calls = RouterCalls(router)
        both = [calls.ask(question(number)) for number in (0, 1)]
        await until(when(router, 1))
        for asked in both:
            asked.answer.cancel()
        await until(lambda: router.num_left == 1)
        after = calls.ask(question(2))
        await until(when(router, 2))
        router.answer(1)
        assert await after.answer == Decision("2")

    run(scene())
