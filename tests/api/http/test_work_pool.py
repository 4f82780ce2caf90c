"""The pool for CPU work beside the event loop: bounds, turns of the tenants, short beside long, clients that leave."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import pytest
from pydantic import BaseModel

from app.api.http.errors import ClientDisconnected
from app.api.http.work_pool import INLINE_S, LONG_S, NODE_CHARS, RequestWork, WorkPool, size_of
from app.errors import OverloadedError
from tests import limits

SHORT_S = (INLINE_S + LONG_S) / 2


class Held:
    """Work that has begun and ends when it is told to."""

    def __init__(self, pool: WorkPool, tenant: str = "held", cost_s: float = SHORT_S) -> None:
        self.begun, self.may_end = threading.Event(), threading.Event()
        self.future: Future[Any] = pool.submit(tenant, cost_s, self._run)

    def _run(self) -> None:
        self.begun.set()
        assert self.may_end.wait(limits.patience_s())


@pytest.fixture
def hold() -> Iterator[Callable[..., Held]]:
    """Occupy threads; all are let go at the end."""
    held: list[Held] = []

    def start(*args: Any, **kwargs: Any) -> Held:
        held.append(Held(*args, **kwargs))
        return held[-1]

    yield start
    for one in held:
        one.may_end.set()


def test_tenants_take_turns(hold: Callable[..., Held]) -> None:
    pool, order = WorkPool(num_threads=1), []
    first = hold(pool)
    assert first.begun.wait(limits.patience_s())
    futures = [pool.submit("greedy", SHORT_S, lambda i=i: order.append(f"greedy {i}")) for i in range(5)]
    futures += [pool.submit("modest", SHORT_S, lambda i=i: order.append(f"modest {i}")) for i in range(2)]
    first.may_end.set()
    for future in futures:
        future.result(limits.patience_s())
    assert order == ["greedy 0", "modest 0", "greedy 1", "modest 1", "greedy 2", "greedy 3", "greedy 4"]


def test_short_work_is_done_beside_any_amount_of_long_work(hold: Callable[..., Held]) -> None:
    pool = WorkPool(num_threads=3)
    long = [hold(pool, cost_s=LONG_S) for _ in range(5)]
    assert pool.submit("held", SHORT_S, lambda: "done").result(limits.patience_s()) == "done"
    assert sum(one.begun.is_set() for one in long) <= 2
    for one in long:
        one.may_end.set()
    for one in long:
        one.future.result(limits.patience_s())


def test_the_queue_is_bounded_in_all_and_for_each_tenant(hold: Callable[..., Held]) -> None:
    pool = WorkPool(num_threads=1, max_waiting=4, max_waiting_per_tenant=3)
    first = hold(pool)
    assert first.begun.wait(limits.patience_s())
    waiting = [pool.submit("a", SHORT_S, lambda: None) for _ in range(3)]
    with pytest.raises(OverloadedError, match="3 pieces of work of this tenant"):
        pool.submit("a", SHORT_S, lambda: None)
    waiting.append(pool.submit("b", SHORT_S, lambda: None))
    with pytest.raises(OverloadedError, match="4 pieces of work wait"):
        pool.submit("b", SHORT_S, lambda: None)
    waiting[0].cancel()  # leaves the queue at once
    assert pool.num_waiting == 3
    waiting.append(pool.submit("b", SHORT_S, lambda: None))
    first.may_end.set()
    for future in waiting[1:]:
        future.result(limits.patience_s())
    assert pool.num_waiting == 0


def test_processes_for_whole_files_leave_a_thread_to_others() -> None:
    async def run() -> str:
        processes, may_end = WorkPool(num_threads=2), threading.Event()
        work = RequestWork(WorkPool(num_threads=1), "t", processes=processes)
        long = [asyncio.ensure_future(work.run_long_process(may_end.wait, limits.patience_s())) for _ in range(3)]
        await asyncio.sleep(0)
        try:
            return await work.run_process(lambda: "heard")
        finally:
            may_end.set()
            await asyncio.gather(*long)

    assert limits.run(run()) == "heard"


def test_errors_reach_who_asked_and_the_thread_goes_on() -> None:
    async def run() -> None:
        work = RequestWork(WorkPool(num_threads=1))
        for _ in range(3):
            with pytest.raises(ZeroDivisionError):
                await work.run(SHORT_S, lambda: 1 // 0)
        assert await work.run(SHORT_S, divmod, 7, 3) == (2, 1)

    asyncio.run(run())


def test_little_work_stays_where_it_is_and_more_does_not() -> None:
    async def run() -> None:
        work = RequestWork(WorkPool())
        assert await work.run(INLINE_S, threading.current_thread) is threading.current_thread()
        assert await work.run(SHORT_S, threading.current_thread) is not threading.current_thread()

    asyncio.run(run())


def test_a_client_that_leaves_takes_its_work_out_of_the_queue(hold: Callable[..., Held]) -> None:
    pool, ran = WorkPool(num_threads=1), []
    first = hold(pool)
    assert first.begun.wait(limits.patience_s())

    async def run() -> None:
        has_left = asyncio.Event()

        async def receive() -> dict[str, Any]:
            await has_left.wait()
            return {"type": "http.disconnect"}

        asking = asyncio.create_task(RequestWork(pool, "t", receive).run(SHORT_S, ran.append, 1))
        await asyncio.sleep(0)
        assert pool.num_waiting == 1
        has_left.set()
        with pytest.raises(ClientDisconnected):
            await asking
        assert pool.num_waiting == 0

    asyncio.run(run())
    first.may_end.set()
    pool.submit("t", SHORT_S, lambda: None).result(limits.patience_s())
    assert not ran


class Large:
    """Something whose end can be watched."""


def fails(large: Large) -> None:
    raise ValueError("no")


@pytest.mark.parametrize("call", [lambda large: large, fails])
def test_what_was_worked_on_is_let_go_of_at_once(call: Callable[[Large], Any]) -> None:
    """A body of 30 MB stayed until the garbage collector came by, and so did the next ones."""

    async def run() -> weakref.ref[Large]:
        large = Large()
        with contextlib.suppress(ValueError):
            await RequestWork(pool).run(SHORT_S, call, large)
        return weakref.ref(large)

    pool = WorkPool(num_threads=1)
    gc.disable()
    try:
        watched = asyncio.run(run())
        pool.submit("t", SHORT_S, lambda: None).result(limits.patience_s())  # the thread is done with it
        assert watched() is None
    finally:
        gc.enable()


class Message(BaseModel):
    role: str
    parts: list[str]


def test_every_text_counts() -> None:
    assert size_of("abc") == NODE_CHARS + 3
    assert size_of({"ab": ["cde", 7]}) == 5 * NODE_CHARS + 5
    assert size_of(Message(role="user", parts=["ab", "c"])) == 5 * NODE_CHARS + 7


def test_counting_stops_where_it_is_enough() -> None:
    class Counted(list[Any]):
        read = 0

        def __iter__(self) -> Iterator[Any]:
            for item in super().__iter__():
                Counted.read += 1
                yield item

    nested = Counted(["x" * 100] * 10)
    assert size_of([nested, Counted(["y"] * 1000), "z" * 1000], enough=500) > 500
    assert Counted.read < 1000
