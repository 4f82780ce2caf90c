"""Requests that wait for the first replica: they are counted, let through, and neither too many nor for ever."""

from __future__ import annotations

import asyncio

import pytest

from app.config.autoscaling import AutoscalingConfig
from app.deployments.ingress.waiting_room import WaitingRoom
from app.errors import DeadlineError, EngineDeadError, OverloadedError
from app.records.bundle import bundled
from app.records.pooling_params import PoolingParams
from app.records.request import Deadline, EngineRequest, Placement
from app.records.sampling_params import SamplingParams
from tests.limits import AT_ONCE_S, run, until


def request(num_tokens: int = 5, tenant: str = "", timeout_s: float | None = None) -> EngineRequest:
    deadline = None if timeout_s is None else Deadline(timeout_s)
    placement = Placement(tenant=tenant, deadline=deadline)
    return EngineRequest("a", [1] * num_tokens, SamplingParams(), placement=placement)


def room(wait_s: float = 1e6, most: int = 2) -> WaitingRoom:
    return WaitingRoom("m", AutoscalingConfig(max_replicas=1, wake_wait_s=wait_s, max_wake_waiting=most))


def test_they_are_counted_while_they_wait_and_go_when_a_replica_is_there() -> None:
    async def scene() -> None:
        waiting, is_open = room(), asyncio.Event()
        tasks = [asyncio.create_task(waiting.wait(request(n), is_open.is_set)) for n in (3, 4)]
        await until(lambda: waiting.num_requests == 2)
        assert waiting.num_tokens == 7
        with pytest.raises(OverloadedError, match="2 requests wait for the first replica of model 'm'"):
            await waiting.wait(request(), is_open.is_set)
        tasks.pop().cancel()  # a client that leaves
        await until(lambda: waiting.num_requests == 1)
        is_open.set()
        await asyncio.gather(*tasks)
        assert (waiting.num_requests, waiting.num_tokens) == (0, 0)

    run(scene())


def test_the_wait_has_an_end() -> None:
    async def scene() -> None:
        waiting = room(wait_s=0.01)
        with pytest.raises(EngineDeadError, match=r"no replica of model 'm' has started within 0\.01 s"):
            await waiting.wait(request(), lambda: False)
        assert waiting.num_requests == 0

    run(scene())


def test_where_the_number_of_replicas_is_fixed_nobody_waits() -> None:
    async def scene() -> None:
        with pytest.raises(EngineDeadError, match="no engine replica of model 'm'"):
            await WaitingRoom("m").wait(request(), lambda: False)

    run(scene())


def test_a_bundle_counts_as_its_prompts() -> None:
    """One of more prompts than the room takes waits in it all the same, and nobody else then."""

    async def scene() -> None:
        prompts = [EngineRequest(str(i), [1] * 5, PoolingParams(task="embed")) for i in range(3)]
        waiting, is_open = room(), False
        task = asyncio.create_task(waiting.wait(bundled(prompts), lambda: is_open))
        await until(lambda: (waiting.num_requests, waiting.num_tokens) == (3, 15))
        for other in (request(), request(tenant="other"), bundled(prompts)):
            with pytest.raises(OverloadedError, match="3 requests wait"):
                await waiting.wait(other, lambda: is_open)
        is_open = True
        await task
        assert (waiting.num_requests, waiting.num_tokens) == (0, 0)

    run(scene())


def test_the_place_of_a_bundle_is_taken_for_as_many_prompts() -> None:
    async def scene() -> None:
        prompts = [EngineRequest(str(i), [1] * 5, PoolingParams(task="embed")) for i in range(3)]
        waiting, is_open = room(most=6), asyncio.Event()
        bundles = [asyncio.create_task(waiting.wait(bundled(prompts), is_open.is_set)) for _ in range(2)]
        await until(lambda: waiting.num_requests == 6)
        other = asyncio.create_task(waiting.wait(request(tenant="other"), is_open.is_set))
        with pytest.raises(OverloadedError):
            await bundles[1]
        await until(lambda: waiting.num_requests == 4)
        is_open.set()
        await asyncio.gather(bundles[0], other)
        assert (waiting.num_requests, waiting._of_tenant) == (0, {})

    run(scene())


def test_one_tenant_cannot_fill_the_room() -> None:
    """Another one's request takes the place of its last one, until both have as many."""

    async def scene() -> None:
        waiting, is_open = room(most=4), asyncio.Event()

        def begin(tenant: str) -> asyncio.Task[None]:
            return asyncio.create_task(waiting.wait(request(tenant=tenant), is_open.is_set))

        greedy = [begin("greedy") for _ in range(4)]
        await until(lambda: waiting.num_requests == 4)
        others = [begin("other"), begin("other")]
        for displaced in greedy[:1:-1]:
            with pytest.raises(OverloadedError):
                await displaced
        for tenant in ("other", "greedy"):
            with pytest.raises(OverloadedError):
                await begin(tenant)
        await until(lambda: waiting.num_requests == 4)
        is_open.set()
        await asyncio.gather(*greedy[:2], *others)
        assert (waiting.num_requests, waiting._of_tenant) == (0, {})

    run(scene())


def test_nobody_goes_for_a_request_that_is_refused() -> None:
    """Two of `greedy` could go, but the bundle is kept, and with it the room is full all the same."""

    async def scene() -> None:
        def bundle(size: int, tenant: str) -> EngineRequest:
            params, placement = PoolingParams(task="embed"), Placement(tenant=tenant)
            return bundled([EngineRequest(str(i), [1], params, placement=placement) for i in range(size)])

        waiting, is_open = room(most=10), asyncio.Event()
        kept = [asyncio.create_task(waiting.wait(request(tenant="greedy"), is_open.is_set)) for _ in range(9)]
        await until(lambda: waiting.num_requests == 9)
        kept.append(asyncio.create_task(waiting.wait(bundle(8, "large"), is_open.is_set)))
        await until(lambda: waiting.num_requests == 17)
        with pytest.raises(OverloadedError, match="17 requests wait"):
            await waiting.wait(bundle(3, "other"), is_open.is_set)
        is_open.set()
        await asyncio.gather(*kept)
        assert (waiting.num_requests, waiting._of_tenant) == (0, {})

    run(scene())


def test_who_waits_is_told_when_the_deadline_has_passed() -> None:
    async def scene() -> None:
        waiting = room()
        with pytest.raises(DeadlineError):
            await waiting.wait(request(timeout_s=AT_ONCE_S), lambda: False)
        with pytest.raises(DeadlineError):
            await waiting.wait_held(request(timeout_s=AT_ONCE_S), lambda: False, lambda: "paused")

    run(scene())
