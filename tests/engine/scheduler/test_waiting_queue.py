"""The waiting queue keeps the order of service."""

from __future__ import annotations

import random

from app.engine.request import Request
from app.engine.sampling_params import SamplingParams
from app.engine.scheduler.waiting_queue import WaitingQueue


def request(key: tuple[int, int]) -> Request:
    made = Request("r", SamplingParams(), [1], 1, 2, (), frozenset(), b"")
    made.key = key
    return made


def test_order_is_that_of_the_keys_whatever_the_order_of_arrival() -> None:
    requests = [request((priority, number)) for priority in (-1, 0, 5) for number in range(20)]
    shuffled = random.Random(0).sample(requests, len(requests))
    queue = WaitingQueue()
    for one in shuffled:
        queue.push(one)
    assert list(queue) == requests


def test_any_request_can_leave_and_find_its_place_again() -> None:
    requests = [request((0, number)) for number in range(10)]
    queue = WaitingQueue()
    for one in requests:
        queue.push(one)
    queue.remove(requests[4])
    assert list(queue) == requests[:4] + requests[5:]
    queue.push(requests[4])
    assert list(queue) == requests
    assert len(queue) == 10
