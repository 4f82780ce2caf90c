"""Requests that wait for the first replica: they are counted, let through, and neither too many nor for ever."""

from __future__ import annotations

import asyncio

import pytest

from app.autoscaling_config import AutoscalingConfig
from app.deployments.waiting_room import WaitingRoom
from app.engine.request import EngineRequest
from app.engine.sampling_params import SamplingParams
from app.errors import EngineDeadError, OverloadedError
from tests.limits import run, until


def request(num_tokens: int = 5) -> EngineRequest:
    return EngineRequest("a", [1] * num_tokens, SamplingParams())


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
