"""Clients that leave, and clients that never finish what they began, through the real proxy in front of the server."""

from __future__ import annotations

import asyncio
import resource
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import httpx
import openai
import pytest

from benchmarks.serve_process import ServeProcess
from tests import limits
from tests.e2e.conftest import metric, wait_until

pytestmark = pytest.mark.timeout(300)

CLIENTS = 200
HALF_OPEN = 4300  # more than Ray lets HAProxy hold by default
HEADERS_S = 10.0  # what configs/serve gives a client to send its headers
CHAT: dict[str, Any] = {"model": "tiny-chat", "messages": [{"role": "user", "content": "Tell me a long story."}]}
LONG: dict[str, Any] = {**CHAT, "max_tokens": 1500, "temperature": 0, "extra_body": {"min_tokens": 1500}}


def requests_in_engine(server: ServeProcess) -> float:
    text = httpx.get(f"{server.base_url}/metrics", timeout=limits.patience_s()).text
    return metric(text, "vllm:num_requests_running") + metric(text, "vllm:num_requests_waiting")


def haproxy_cpu_s(server: ServeProcess) -> float:
    """CPU seconds of HAProxy so far."""
    processes = [process for process in server.processes() if process.name() == "haproxy"]
    assert processes, "the server runs without HAProxy"
    return sum(sum(process.cpu_times()[:2]) for process in processes)


async def ask_and_leave(server: ServeProcess, stream: bool) -> None:
    """`CLIENTS` requests of the SDK at once, all given up once all of them are in the engine."""
    async with httpx.AsyncClient(limits=httpx.Limits(max_connections=None), timeout=limits.patience_s()) as http:
        sdk = openai.AsyncOpenAI(base_url=f"{server.base_url}/v1", api_key="none", max_retries=0, http_client=http)

        async def ask() -> None:
            answer = await sdk.chat.completions.create(**LONG, stream=stream)
            if stream:
                async for _ in answer:
                    pass

        tasks = [asyncio.create_task(ask()) for _ in range(CLIENTS)]
        limit = limits.Limit(60.0)
        while (inside := await asyncio.to_thread(requests_in_engine, server)) < CLIENTS:
            if not limit.left_s():
                limit.fail(f"{CLIENTS} requests in the engine, but {inside}")
            assert not any(task.done() for task in tasks), "a request has ended by itself"
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_clients_that_leave_are_noticed(quickstart: ServeProcess, stream: bool) -> None:
    wait_until(lambda: requests_in_engine(quickstart) == 0, 10, "an idle server")
    asyncio.run(ask_and_leave(quickstart, stream))
    wait_until(
        lambda: requests_in_engine(quickstart) == 0, 10, "every request has ended"
    )  # by itself: a minute or more
    before = haproxy_cpu_s(quickstart)
    limits.pause(0.5)
    assert haproxy_cpu_s(quickstart) - before < 0.2, "HAProxy spins"


@contextmanager
def half_open(server: ServeProcess, count: int) -> Iterator[list[socket.socket]]:
    """Connections that have sent half a header."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < count + 500:
        pytest.skip(f"this process may open {hard} files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, count + 500), hard))
    with ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        connections = []
        for _ in range(count):
            connection = socket.create_connection(("127.0.0.1", server.port), timeout=limits.patience_s())
            connections.append(stack.enter_context(connection))
            connections[-1].sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nX-Half: ")
        yield connections


def answers(server: ServeProcess) -> None:
    with httpx.Client(base_url=server.base_url, timeout=limits.patience_s()) as http:
        assert http.get("/health").status_code == 200
        assert http.post("/v1/chat/completions", json={**CHAT, "max_tokens": 4}).status_code == 200


def test_half_open_connections_lock_nobody_out(quickstart: ServeProcess) -> None:
    with half_open(quickstart, HALF_OPEN):
        answers(quickstart)


@pytest.mark.parametrize(
    ("header", "status"),
    [
        (b"x-request-id: \xff\xfe", b"200"),
        (b"x-request-timeout-seconds: \xff\xfe", b"200"),
        (b"Connection: Upgrade\r\nUpgrade: websocket", b"400"),
    ],
    ids=["request-id", "timeout", "websocket"],
)
def test_headers_of_strangers_are_answered(quickstart: ServeProcess, header: bytes, status: bytes) -> None:
    """What Serve and uvicorn read before Manta is asked. Until HAProxy has heard of the ingress replica, a second or so
    after the start, Serve's own proxy stands in, and refuses what it cannot read."""
    request = b"GET /health HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n" + header + b"\r\n\r\n{}"

    def has_answer() -> bool:
        with socket.create_connection(("127.0.0.1", quickstart.port), timeout=limits.patience_s()) as connection:
            connection.sendall(request)
            try:
                return connection.recv(4096).startswith(b"HTTP/1.1 " + status + b" ")
            except ConnectionError:  # the stand-in closes before it has read all
                return False

    wait_until(has_answer, 30.0, f"an answer {status.decode()}")


@pytest.mark.slow
def test_half_open_connections_are_closed(quickstart: ServeProcess) -> None:
    """Others are answered throughout, and no such connection outlives its time."""
    with half_open(quickstart, HALF_OPEN) as connections:
        limit = limits.Limit(HEADERS_S + 2)
        while limit.passed_s < limit.calm_s:
            answers(quickstart)
            limits.pause(0.5)
        replies = [connection.recv(4096) for connection in connections]
    assert all(reply.startswith(b"HTTP/1.1 408 ") for reply in replies)


@pytest.mark.slow
def test_requests_that_give_up(quickstart: ServeProcess) -> None:
    """As above with the library `requests`, which gives up after half a second, one thread a client."""
    import requests

    def ask(_: int) -> bool:
        body = {**CHAT, "max_tokens": 1500, "min_tokens": 1500}
        try:
            requests.post(f"{quickstart.base_url}/v1/chat/completions", json=body, timeout=limits.scaled_s(0.5))
        except requests.RequestException:
            return True
        return False

    with ThreadPoolExecutor(CLIENTS) as pool:
        assert all(pool.map(ask, range(CLIENTS)))
    wait_until(lambda: requests_in_engine(quickstart) == 0, 10, "every request has ended")
    before = haproxy_cpu_s(quickstart)
    limits.pause(2)
    assert haproxy_cpu_s(quickstart) - before < 0.4, "HAProxy spins"
