"""Clients that leave and clients that are slow."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import socket
import threading
from typing import Any

import httpx
import pytest

from app.api.generation.events import MAX_READY, Choice, EventStream, collect
from app.api.generation.render import Prompt, engine_requests
from app.config.limits import RequestLimits
from app.records.sampling_params import SamplingParams
from app.text.output_processor import OutputProcessor
from tests import limits
from tests.limits import wait_until

BODY = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 400}


def open_socket(port: int, body: dict[str, Any]) -> socket.socket:
    """POST without a client library, to be able to vanish."""
    raw = json.dumps(body).encode()
    connection = socket.create_connection(("127.0.0.1", port))
    head = "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n"
    head += f"content-type: application/json\r\ncontent-length: {len(raw)}\r\n\r\n"
    connection.sendall(head.encode() + raw)
    return connection


@pytest.mark.parametrize(("stream", "n"), [(True, 1), (True, 3), (False, 1), (False, 3)])
def test_a_disconnect_closes_the_engine_s_iterators(server: Any, client: Any, stream: bool, n: int) -> None:
    client.delay_s = 0.01
    client.script = lambda request: [50] * 390
    connection = open_socket(server.port, {**BODY, "stream": stream, "n": n})
    if stream:
        received = b""
        while received.count(b"data: ") < 5 + n:
            received += connection.recv(4096)
    else:
        wait_until(lambda: client.num_running == n)
    connection.close()
    wait_until(lambda: client.num_running == 0)
    assert client.num_aborted == n
    assert client.num_aborted == n


def test_a_disconnect_before_the_first_token(server: Any, client: Any) -> None:
    client.delay_s = 30.0
    connection = open_socket(server.port, {**BODY, "stream": True})
    wait_until(lambda: client.num_running == 1)
    connection.close()
    wait_until(lambda: client.num_running == 0)


def test_many_disconnects_leak_nothing(server: Any, client: Any) -> None:
    client.delay_s = 0.002
    client.script = lambda request: [50] * 300
    connections = [open_socket(server.port, {**BODY, "stream": i % 3 > 0, "n": 1 + i % 2}) for i in range(60)]
    for i, connection in enumerate(connections):
        if i % 3 == 1:
            connection.recv(100)
        connection.close()
    wait_until(lambda: client.num_running == 0)
    client.delay_s = 0.0
    assert httpx.post(f"{server.url}/v1/chat/completions", json=BODY).status_code == 200
    assert client.num_running == 0


def test_the_first_token_is_not_held_back(server: Any, client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = threading.Event()
    generate = client.generate

    async def gated(*args: Any) -> Any:
        async for output in generate(*args):
            yield output
            # The second token exists only once the client has the first.
            assert await asyncio.to_thread(seen.wait, 8)

    monkeypatch.setattr(client, "generate", gated)
    client.script = lambda request: [50, 51, 52]
    url = f"{server.url}/v1/chat/completions"
    with httpx.stream("POST", url, json={**BODY, "stream": True}, timeout=limits.patience_s()) as response:
        for line in response.iter_lines():
            if '"content": "P' in line:
                seen.set()
    assert seen.is_set()


def make_stream(client: Any, receive: Any, n: int = 1, **params: Any) -> EventStream:
    model = client.models["m"]
    sampling = SamplingParams(n=n, max_tokens=400, **params)
    requests = engine_requests(model, RequestLimits(), [Prompt([50])], sampling, request_id="r")
    choices = [Choice(i, 0, own, OutputProcessor(model.tokenizer, own.sampling)) for i, own in enumerate(requests)]
    return EventStream(client, "m", choices, receive)


async def never() -> Any:
    await asyncio.Event().wait()


def test_ready_events_come_in_one_batch(client: Any) -> None:
    client.script = lambda request: [50] * 100

    async def read() -> list[int]:
        async with make_stream(client, never, n=2) as stream:
            sizes = []
            while batch := await stream.next_batch():
                sizes.append(len(batch))
                await limits.async_pause(0.01)  # a writer that takes its time
            return sizes

    sizes = asyncio.run(read())
    assert sum(sizes) == 202
    assert len(sizes) < 60


def test_a_slow_writer_stops_the_pulling(client: Any) -> None:
    client.script = lambda request: [50] * 390
    pulled = 0
    outputs = client._outputs

    def counted(*args: Any) -> Any:
        nonlocal pulled
        for output in outputs(*args):
            pulled += 1
            yield output

    client._outputs = counted

    async def read() -> tuple[int, int]:
        async with make_stream(client, never) as stream:
            await limits.async_pause(0.3)
            held = pulled
            total = 0
            while batch := await stream.next_batch():
                total += len(batch)
            return held, total

    held, total = asyncio.run(read())
    assert held <= MAX_READY + 1
    assert total == 391


def test_a_stop_string_tells_the_engine_how_it_ended(client: Any) -> None:
    tokenizer = client.models["m"].tokenizer
    client.script = lambda request: tokenizer.encode("the fox and more words", add_special_tokens=False)
    routes = []
    generate = client.generate

    def recording(model: str, request: Any, route: Any) -> Any:
        routes.append(route)
        return generate(model, request, route)

    client.generate = recording
    collected = asyncio.run(collect(make_stream(client, never, n=2, stop="fox")))
    assert [entry.output.text for entry in collected] == ["the ", "the "]
    assert [route.extra for route in routes] == [{"finish_reason": "stop"}] * 2
    assert client.num_aborted == 2


def test_the_choices_of_a_prompt_share_a_place(client: Any) -> None:
    places: dict[int, list[Any]] = {}
    generate = client.generate

    def recording(model: str, request: Any, route: Any) -> Any:
        places.setdefault(request.prompt_token_ids[0], []).append(route.place)
        return generate(model, request, route)

    client.generate = recording
    model = client.models["m"]
    requests = engine_requests(
        model, RequestLimits(), [Prompt([50]), Prompt([51])], SamplingParams(n=3, max_tokens=4), request_id="r"
    )
    choices = [Choice(i, i // 3, own, OutputProcessor(model.tokenizer, own.sampling)) for i, own in enumerate(requests)]
    assert len(asyncio.run(collect(EventStream(client, "m", choices, never)))) == 6
    assert [len(shared) for shared in places.values()] == [3, 3]
    assert [len({id(place) for place in shared}) for shared in places.values()] == [1, 1]
    assert places[50][0] is not places[51][0]


class CountingClient:
    """Adds up to how many requests another client runs at a time."""

    def __init__(self, client: Any) -> None:
        self.models = client.models
        self.peak = 0
        self._client = client

    async def generate(self, *args: Any) -> Any:
        # Closed at once: an iterator left to the event loop's own clean-up would count as running beside its successor.
        async with contextlib.aclosing(self._client.generate(*args)) as outputs:
            async for output in outputs:
                self.peak = max(self.peak, self._client.num_running)
                yield output


def test_a_body_of_many_choices_leaves_rows_to_others(served_model: Any, make_client: Any, serve: Any) -> None:
    """A neighbour's one token waited for all of 4,096 choices."""
    client = make_client(dataclasses.replace(served_model, max_num_seqs=4))
    counting = CountingClient(client)
    client.script = lambda request: [50] * 5
    client.delay_s = 0.001
    url = serve(counting).url
    answer = httpx.post(f"{url}/v1/chat/completions", json={**BODY, "n": 8}, timeout=limits.patience_s()).json()
    assert [choice["index"] for choice in answer["choices"]] == list(range(8))
    assert counting.peak == 3


@pytest.mark.parametrize(("num_prompts", "peak"), [(1, 3), (2, 6), (4, 6)])
def test_the_choices_of_a_prompt_leave_rows_of_their_replica(
    served_model: Any, make_client: Any, serve: Any, num_prompts: int, peak: int
) -> None:
    """They all run on one, so three quarters of all replicas' rows would be all of its own."""
    client = make_client(dataclasses.replace(served_model, max_num_seqs=8, num_replicas=2))
    client.delay_s = 0.001
    running: list[int] = []

    def watch(request: Any) -> list[int]:
        running.append(client.num_running)
        return [50] * 5

    client.script = watch
    body = {"model": "m", "prompt": ["x", "y", "z", "w"][:num_prompts], "n": 8}
    answer = httpx.post(f"{serve(client).url}/v1/completions", json=body, timeout=limits.patience_s()).json()
    assert len(answer["choices"]) == 8 * num_prompts
    assert max(running) == peak


def test_choices_that_wait_for_their_turn_are_never_begun_for_a_client_that_left(
    served_model: Any, make_client: Any, serve: Any, wait_for: Any
) -> None:
    client = make_client(dataclasses.replace(served_model, max_num_seqs=2))
    client.delay_s = 30.0
    connection = open_socket(serve(client).port, {**BODY, "n": 6})
    wait_for(lambda: client.num_running == 1)
    connection.close()
    wait_for(lambda: client.num_running == 0)
    assert len(client.requests) == 1
