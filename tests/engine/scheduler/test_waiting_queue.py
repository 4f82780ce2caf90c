"""The waiting queue keeps the order of service."""

from __future__ import annotations

import random

from app.engine.scheduler.waiting_queue import WaitingQueue
from app.records.request import EngineRequest
from app.records.request_state import Request
from app.records.sampling_params import SamplingParams


def request(key: int) -> Request:
    made = Request(EngineRequest("r", [], SamplingParams()), [1], 1, 2, (), frozenset(), b"")
    made.key = key
    return made


def test_order_is_that_of_the_keys_whatever_the_order_of_arrival() -> None:
    requests = [request(100 * priority + number) for priority in (-1, 0, 5) for number in range(20)]
    shuffled = random.Random(0).sample(requests, len(requests))
    queue = WaitingQueue()
    for one in shuffled:
        queue.push(one)
    assert list(queue) == requests


def test_any_request_can_leave_and_find_its_place_again() -> None:
    requests = [request(number) for number in range(10)]
    queue = WaitingQueue()
    for one in requests:
        queue.push(one)
    queue.remove(requests[4])
    assert list(queue) == requests[:4] + requests[5:]
    queue.push(requests[4])
    assert list(queue) == requests
    assert len(queue) == 10


def test_its_load_is_that_of_its_requests() -> None:
    """Whoever comes and goes; what the cache knows of one shows once its turn to be looked at has come."""
    rng, known = random.Random(1), dict[Request, int]()
    queue = WaitingQueue(lambda request: known.get(request, 0))
    waiting: list[Request] = []
    for number in range(500):
        if waiting and rng.random() < 0.4:
            gone = waiting.pop(rng.randrange(len(waiting)))
            queue.remove(gone)
        else:
            one = request(number)
            one.token_ids, one.max_total_tokens = [1] * rng.randint(1, 50), 60
            waiting.append(one)
            queue.push(one)
        assert queue.load.outstanding(1.0) == (sum(one.num_tokens for one in waiting), len(waiting))
        assert queue.load.to_compute == sum(one.num_tokens for one in waiting)
    known[waiting[0]] = waiting[0].num_tokens
    for _ in waiting:
        queue.load.refresh(1)
    assert queue.load.outstanding(1.0)[0] == sum(one.num_tokens for one in waiting[1:])
