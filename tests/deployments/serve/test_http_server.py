"""The HTTP server of an ingress replica, run as Serve runs it: its own middleware and headers, uvicorn by default."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from ray.serve._private.constants import SERVE_MULTIPLEXED_MODEL_ID
from ray.serve._private.http_util import (
    RequestIdMiddleware,
    parse_disconnect_disabled_header,
    parse_request_timeout_header,
    parse_session_id_header,
)
from starlette.types import Receive, Scope, Send
from uvicorn.config import HTTP_PROTOCOLS, WS_PROTOCOLS
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

from app.api.http.json_response import JSONResponse
from app.api.server.app import create_app
from app.config.limits import RequestLimits
from app.deployments.app import build
from app.deployments.serve import http_server, websocket_protocol
from app.deployments.serve.http_server import HOOK, prepare
from tests import limits
from tests.api.conftest import ScriptedClient, served, write_model
from tests.limits import run

KEY = "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ=="
UNWATCHED = "x-request-disconnect-disabled"
HANDSHAKE = ("Upgrade: websocket", "Connection: Upgrade", "Sec-WebSocket-Version: 13", KEY)


@pytest.fixture(autouse=True)
def protocols(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `prepare` changes is put back."""
    for protocols in (HTTP_PROTOCOLS, WS_PROTOCOLS):
        monkeypatch.setitem(protocols, "auto", protocols["auto"])  # type: ignore[misc]


async def application(scope: Scope, receive: Receive, send: Send) -> None:
    """Read what Serve reads of the headers, the way it does; answer with the request id."""
    if scope["type"] == "websocket":
        await receive()
        await send({"type": "websocket.accept"})
        await send({"type": "websocket.close"})
        return
    headers = dict(scope["headers"])
    request_id = headers[b"x-request-id"].decode()
    parse_request_timeout_header(headers, None)
    parse_disconnect_disabled_header(headers)
    parse_session_id_header(headers)
    for key, value in headers.items():
        if key.decode().lower().replace("-", "_") == SERVE_MULTIPLEXED_MODEL_ID:
            value.decode()
    await JSONResponse({"id": request_id, "names": [name.decode("latin-1") for name in headers]})(scope, receive, send)


@asynccontextmanager
async def server() -> AsyncIterator[int]:
    """The port of one before `application`."""
    async with serving(application) as (_, port):
        yield port


@asynccontextmanager
async def serving(inner: Any) -> AsyncIterator[tuple[uvicorn.Server, int]]:
    """A server with what `prepare` gives Serve, in Serve's order, and its port."""
    app: Any = RequestIdMiddleware(inner)
    for middleware in prepare():
        app = middleware.cls(app, *middleware.args, **middleware.kwargs)
    config = uvicorn.Config(lambda: app, factory=True, lifespan="off", log_config=None, access_log=False)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        running = uvicorn.Server(config)
        task = asyncio.create_task(running.serve(sockets=[listening]))
        yield running, listening.getsockname()[1]
        running.should_exit = True
        await task


async def answer(port: int, method: str, *headers: str | bytes, body: bytes = b"") -> tuple[bytes, bytes]:
    """The head and the body that come back, once the server has ended the connection or the body is whole."""
    lines = [f"{method} /x HTTP/1.1", "Host: x", *headers]
    data = b"\r\n".join(line if isinstance(line, bytes) else line.encode() for line in lines)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data + b"\r\n\r\n" + body)
    try:
        async with asyncio.timeout(limits.patience_s()):
            head = await reader.readuntil(b"\r\n\r\n")
            length = next((line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")), b":0")
            return head, await reader.readexactly(int(length.split(b":")[1]))
    finally:
        writer.close()


@pytest.mark.parametrize(
    "name",
    [
        "x-request-id",
        "X-Request-Id",
        "x-request-timeout-seconds",
        "x-request-disconnect-disabled",
        "x-session-id",
        "x_session_id",
        "serve_multiplexed_model_id",
        "serve-multiplexed-model-id",
        "traceparent",
    ],
)
def test_headers_that_serve_reads_may_hold_any_bytes(name: str) -> None:
    async def check() -> None:
        async with server() as port:
            head, body = await answer(port, "GET", name.encode() + b": \xff\xfe", "Connection: close")
        assert head.startswith(b"HTTP/1.1 200 ")
        answered = json.loads(body)
        assert len(answered["id"]) == 32
        assert set(answered["names"]) == {"host", "connection", "x-request-id"}
        assert f"\r\nx-request-id: {answered['id']}\r\n".encode() in head.lower()

    run(check())


@pytest.mark.parametrize("has_own_thread", [False, True])
@pytest.mark.parametrize(("path", "others"), [("/v1/embeddings", {"a": "1"}), ("/x", {"a": "1", UNWATCHED: "?0"})])
def test_serve_watches_no_client_of_a_busy_path(
    monkeypatch: pytest.MonkeyPatch, path: str, others: dict[str, str], has_own_thread: bool
) -> None:
    """But where the application runs in a thread of its own, it watches all: it hands on only then what wakes that."""
    monkeypatch.setattr(http_server, "HAS_OWN_THREAD", has_own_thread)
    seen: list[bool] = []

    async def inner(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(parse_disconnect_disabled_header(dict(scope["headers"])))

    (middleware,) = prepare()
    scope = {"type": "http", "path": path, "headers": [(n.encode(), v.encode()) for n, v in others.items()]}
    run(middleware.cls(inner, **middleware.kwargs)(scope, None, None))  # type: ignore[arg-type]
    assert seen == [path == "/v1/embeddings" and not has_own_thread]
    assert others.items() <= {name.decode(): value.decode() for name, value in scope["headers"]}.items()


def test_headers_that_serve_can_read_are_kept() -> None:
    async def check() -> None:
        async with server() as port:
            _, body = await answer(port, "GET", "x-session-id: a", "x-session: \xff", "Connection: close")
        assert {"x-session-id", "x-session"} <= set(json.loads(body)["names"])

    run(check())


@pytest.mark.parametrize(
    ("given", "kept"), [(["abc-1"], "abc-1"), (["abc-1", "abc-2"], "abc-1"), (["a" * 5000], None), (["a b"], None)]
)
def test_a_request_has_one_id(given: list[str], kept: str | None) -> None:
    """The same for Serve, which reads the last header of the name, and for Manta, which reads the first."""

    async def check() -> None:
        async with server() as port:
            headers = [f"X-Request-ID: {one}" for one in given]
            head, body = await answer(port, "GET", *headers, "Connection: close")
        found = json.loads(body)["id"]
        assert head.lower().count(b"\r\nx-request-id: ") == 1
        assert found == kept if kept else len(found) == 32

    run(check())


@pytest.mark.parametrize(
    ("method", "headers", "body"),
    [
        ("POST", (*HANDSHAKE, "Content-Length: 2"), b"{}"),
        ("POST", (*HANDSHAKE, "Content-Length: 0"), b""),
        ("GET", (*HANDSHAKE, "Content-Length: 2"), b"{}"),
        ("GET", (*HANDSHAKE, "x-long: " + "a" * 20_000), b""),
        ("GET", (*HANDSHAKE, *(f"x-{i}: a" for i in range(300))), b""),
    ],
    ids=["post", "post-empty", "body", "long-header", "many-headers"],
)
def test_what_is_no_handshake_is_answered(method: str, headers: tuple[str, ...], body: bytes) -> None:
    async def check() -> None:
        async with server() as port:
            head, answered = await answer(port, method, *headers, body=body)
        assert head.startswith(b"HTTP/1.1 400 ")
        assert json.loads(answered)["error"]["message"].startswith("this is no websocket handshake: ")

    run(check())


def test_a_handshake_is_one() -> None:
    async def check() -> None:
        async with server() as port:
            head, _ = await answer(port, "GET", *HANDSHAKE)
        assert head.startswith(b"HTTP/1.1 101 ")

    run(check())


@pytest.fixture
def client(tmp_path: Path) -> ScriptedClient:
    return ScriptedClient(served(write_model(tmp_path / "model")))


def open_socket(port: int) -> connect:
    limit_s = limits.patience_s()
    return connect(f"ws://127.0.0.1:{port}/v1/responses", proxy=None, open_timeout=limit_s, close_timeout=limit_s)


async def told(socket: ClientConnection) -> tuple[list[str], int]:
    """The types of the events that come, and the code with which the server closes the websocket."""
    types = []
    try:
        async with asyncio.timeout(limits.patience_s()):
            while True:
                types.append(json.loads(await socket.recv())["type"])
    except ConnectionClosed as error:
        return types, error.rcvd.code if error.rcvd is not None else 1006


def test_a_server_that_ends_lets_answers_end(client: ScriptedClient) -> None:
    async def check() -> None:
        client.gate = asyncio.Event()
        app = create_app(client, RequestLimits())
        async with serving(app) as (running, port), open_socket(port) as idle, open_socket(port) as busy:
            await busy.send(json.dumps({"type": "response.create", "model": "m", "input": "hi"}))
            await limits.until(lambda: client.num_running == 1, "the answer")
            running.should_exit = True
            assert await told(idle) == ([], 1012)
            client.gate.set()
            types, code = await told(busy)
        assert (types[0], types[-1], code) == ("response.created", "response.completed", 1012)

    run(check())


def test_what_comes_in_part_is_bounded(client: ScriptedClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(websocket_protocol, "MAX_UNFINISHED_BYTES", 150_000)
    unfinished = websocket_protocol.WebSocketProtocol.unfinished

    async def check() -> None:
        rest = asyncio.Event()

        async def pieces() -> AsyncIterator[str]:
            yield "x" * 100_000
            await rest.wait()
            yield "}"

        app = create_app(client, RequestLimits())
        async with serving(app) as (_, port), open_socket(port) as first, open_socket(port) as second:
            sending = asyncio.create_task(first.send(pieces()))
            await limits.until(lambda: len(unfinished) == 1, "a part of a message")
            too_much = asyncio.create_task(second.send(pieces()))
            assert await told(second) == ([], 1013)
            await limits.until(lambda: len(unfinished) == 1, "the end of the second")
            rest.set()
            await asyncio.gather(sending, too_much, return_exceptions=True)
            refused = json.loads(await first.recv())
            assert (refused["type"], refused["status"]) == ("error", 400)
            assert not unfinished

    run(check())


def test_a_message_has_so_many_frames(client: ScriptedClient) -> None:
    async def check() -> None:
        async with serving(create_app(client, RequestLimits())) as (_, port), open_socket(port) as socket:
            with contextlib.suppress(ConnectionClosed):
                await socket.send([""] * (websocket_protocol.MAX_FRAMES + 10))
            assert await told(socket) == ([], 1009)

    run(check())


def test_serve_asks_for_it_in_ingresses_only() -> None:
    ingress = build({"models": [{"name": "tiny-chat"}]})
    assert ingress._bound_deployment.ray_actor_options["runtime_env"] == {"env_vars": HOOK}
