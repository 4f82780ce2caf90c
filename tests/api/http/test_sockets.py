"""Websockets over /v1/responses: who may open one, what bounds it, and how each side ends it."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from socket import SHUT_RDWR
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect

from app.api.http.auth import ApiKey, ApiKeys
from app.api.http.sockets import MAX_WAITING
from app.api.server.app import create_app
from app.config.ingress import IngressConfig
from app.config.limits import RequestLimits
from tests.limits import patience_s, scaled_s, wait_until

KEYS = ApiKeys([ApiKey.parse("alice=key-of-alice", ""), ApiKey.parse("bob=key-of-bob", "")])
ALICE, BOB = {"Authorization": "Bearer key-of-alice"}, {"Authorization": "Bearer key-of-bob"}
CREATE = {"type": "response.create", "model": "m", "input": "hi"}
Open = Callable[..., ClientConnection]


class Served:
    """An application behind uvicorn."""

    def __init__(self, app: Any, url: str, stack: ExitStack) -> None:
        self.app = app
        self.url = url
        self._stack = stack

    def open(self, path: str = "/v1/responses", **headers: str) -> ClientConnection:
        options: Any = {"open_timeout": patience_s(), "close_timeout": scaled_s(1.0), "max_size": None}
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        url = self.url.replace("http://", "ws://") + path
        return self._stack.enter_context(connect(url, additional_headers=named, proxy=None, **options))

    def refusal(self, **headers: str) -> tuple[int, dict[str, Any]]:
        with pytest.raises(InvalidStatus) as error:
            self.open(**headers)
        response = error.value.response
        return response.status_code, json.loads(response.body or b"{}").get("error", {})


@pytest.fixture
def serving(client: Any, http_to: Any) -> Iterator[Callable[..., Served]]:
    with ExitStack() as stack:

        def start(limits: RequestLimits | None = None, keys: ApiKeys | None = None, **ingress: Any) -> Served:
            app = create_app(client, limits or RequestLimits(), IngressConfig(**ingress), keys=keys or ApiKeys())
            return Served(app, str(http_to(app).base_url), stack)

        yield start


def ask(socket: ClientConnection, **fields: Any) -> None:
    socket.send(json.dumps({**CREATE, **fields}))


def event(socket: ClientConnection) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(socket.recv(timeout=patience_s()))
    return found


def events(socket: ClientConnection) -> list[dict[str, Any]]:
    """Those of one answer."""
    found = [event(socket)]
    while found[-1]["type"] not in ("error", "response.completed", "response.incomplete", "response.failed"):
        found.append(event(socket))
    return found


def closing(socket: ClientConnection) -> tuple[int, str]:
    """How the server closes the socket."""
    try:
        while True:
            socket.recv(timeout=patience_s())
    except ConnectionClosed as error:
        return (error.rcvd.code, error.rcvd.reason) if error.rcvd is not None else (1006, "")


def test_messages_are_answered_one_after_another(serving: Any) -> None:
    socket = serving().open()
    for _ in range(3):
        ask(socket)
    answers = [events(socket) for _ in range(3)]
    for answer in answers:
        assert [one["sequence_number"] for one in answer] == list(range(len(answer)))
        assert (answer[0]["type"], answer[-1]["type"]) == ("response.created", "response.completed")
    assert len({answer[0]["response"]["id"] for answer in answers}) == 3


def test_an_event_is_what_the_post_streams(serving: Any, http_to: Any) -> None:
    server = serving()
    socket = server.open()
    ask(socket, store=False, temperature=0)
    body = {"model": "m", "input": "hi", "stream": True, "store": False, "temperature": 0}
    streamed = http_to(server.app).post("/v1/responses", json=body).text
    datas = [json.loads(line[6:]) for line in streamed.split("\n") if line.startswith("data: ")]

    def shape(event: dict[str, Any]) -> Any:
        return event["type"], event["sequence_number"], sorted(event), event.get("delta")

    assert list(map(shape, events(socket))) == list(map(shape, datas))


def test_only_holders_of_keys_and_only_that_path(serving: Any) -> None:
    server = serving(keys=KEYS)
    assert server.refusal()[0] == 401
    status, error = server.refusal(Authorization="Bearer wrong")
    assert (status, error["type"], error["message"]) == (401, "authentication_error", "wrong API key")
    socket = server.open(**ALICE)
    ask(socket)
    assert events(socket)[-1]["type"] == "response.completed"
    with pytest.raises(InvalidStatus, match="403"):
        server.open("/v1/chat/completions", **ALICE)


def test_a_key_that_is_withdrawn_ends_the_answers(serving: Any) -> None:
    keys = ApiKeys([ApiKey.parse("alice=key-of-alice", "")])
    socket = serving(keys=keys).open(**ALICE)
    ask(socket)
    assert events(socket)[-1]["type"] == "response.completed"
    keys._keys = KEYS._keys[1:]
    ask(socket)
    refused = event(socket)
    assert (refused["type"], refused["status"], refused["error"]["type"]) == ("error", 401, "authentication_error")


def test_pages_of_other_sites_open_none(serving: Any) -> None:
    server = serving(cors_origins=("https://ours.example",))
    status, error = server.refusal(Origin="https://evil.example")
    assert (status, error["code"]) == (403, "foreign_origin")
    for origin in ("https://ours.example", server.url):
        ask(socket := server.open(Origin=origin))
        assert events(socket)[-1]["type"] == "response.completed"


def test_too_many_headers_open_none(serving: Any) -> None:
    assert serving(RequestLimits(max_headers=4)).refusal()[0] == 431


def test_the_number_of_sockets_is_bounded(serving: Any) -> None:
    server = serving(keys=KEYS, max_sockets=2, max_tenant_sockets=1)
    first = server.open(**ALICE)
    status, error = server.refusal(**ALICE)
    assert (status, error["code"]) == (429, "overloaded")
    server.open(**BOB)
    assert len(server.app.state.sockets) == 2
    first.close()
    wait_until(lambda: len(server.app.state.sockets) == 1, "the end of a socket")
    server.open(**ALICE)
    assert serving(max_sockets=0).refusal()[0] == 503


def test_a_refusal_is_an_event_and_the_socket_goes_on(serving: Any) -> None:
    socket = serving(RequestLimits(max_body_bytes=2000)).open()
    for message, status, param in (
        ("{", 400, None),
        (json.dumps({**CREATE, "model": "unknown"}), 404, "model"),
        (json.dumps({**CREATE, "temperature": -1}), 400, "temperature"),
        (json.dumps({**CREATE, "type": "response.steer"}), 400, "type"),
        (json.dumps({**CREATE, "input": "x" * 2000}), 413, None),
    ):
        socket.send(message)
        refused = event(socket)
        assert (refused["type"], refused["status"]) == ("error", status), refused
        assert refused["error"]["param"] == refused["param"] == param
        assert refused["message"] == refused["error"]["message"]
    socket.send(json.dumps(CREATE).encode())  # bytes are read like text
    assert events(socket)[-1]["type"] == "response.completed"


def test_an_overload_says_when_to_come_back(serving: Any, client: Any) -> None:
    from app.errors import OverloadedError

    client.fail_once = OverloadedError("full", retry_after_s=3.0)
    ask(socket := serving().open())
    refused = event(socket)
    assert (refused["status"], refused["error"]["headers"]["retry-after"]) == (429, "3")


def test_a_stream_that_breaks_ends_in_an_event(serving: Any, client: Any) -> None:
    from app.errors import EngineDeadError

    client.fail_after = (2, EngineDeadError("the engine died"))
    ask(socket := serving().open())
    last = events(socket)[-1]
    assert (last["type"], last["response"]["error"]["message"]) == ("response.failed", "the engine died")


def test_an_idle_socket_is_closed(serving: Any) -> None:
    socket = serving(socket_idle_s=scaled_s(0.2)).open()
    ask(socket)
    assert events(socket)[-1]["type"] == "response.completed"
    code, reason = closing(socket)
    assert code == 1001
    assert reason.startswith("idle for")


def test_an_answer_under_way_is_not_idle_and_outlives_the_socket(serving: Any, client: Any) -> None:
    client.gate = asyncio.Event()
    socket = serving(socket_idle_s=scaled_s(0.1), max_socket_s=scaled_s(0.2)).open()
    ask(socket)
    ask(socket)
    wait_until(lambda: client.num_running == 1, "the first answer")
    threading.Timer(scaled_s(0.5), client.open).start()
    assert events(socket)[-1]["type"] == "response.completed"
    refused = event(socket)
    assert (refused["type"], refused["error"]["code"]) == ("error", "websocket_connection_limit_reached")
    assert closing(socket) == (1001, "too old")
    assert len(client.requests) == 1


@pytest.mark.parametrize("politely", [True, False])
def test_a_client_that_leaves_aborts_the_work(serving: Any, client: Any, politely: bool) -> None:
    client.gate = asyncio.Event()
    server = serving()
    ask(socket := server.open())
    wait_until(lambda: client.num_running == 1, "the answer")
    # Not close(): the client's thread still reads there, so nothing would be sent until the server asks (15 s).
    socket.close() if politely else socket.socket.shutdown(SHUT_RDWR)
    wait_until(lambda: (client.num_running, client.num_aborted) == (0, 1), "the abort")
    wait_until(lambda: len(server.app.state.sockets) == 0, "the end of the socket")


def test_a_flood_of_messages_is_ended(serving: Any, client: Any) -> None:
    client.gate = asyncio.Event()
    socket = serving().open()
    for _ in range(MAX_WAITING + 2):
        ask(socket)
    code, reason = closing(socket)
    assert (code, reason) == (1008, f"more than {MAX_WAITING} messages wait")
    wait_until(lambda: client.num_aborted == 1, "the abort")


def test_messages_that_wait_count_as_bodies(serving: Any, client: Any) -> None:
    client.gate = asyncio.Event()
    limits = RequestLimits(max_bodies_bytes=400_000, max_prompt_chars=1 << 20)
    socket = serving(limits).open()
    ask(socket)
    wait_until(lambda: client.num_running == 1, "the answer")
    for _ in range(2):
        ask(socket, input="x" * 150_000)
    client.open()
    assert events(socket)[-1]["type"] == "response.completed"
    statuses = [events(socket)[-1]["status"] for _ in range(2)]
    assert statuses == [400, 429]  # too long for the context, and no room to wait


def test_a_server_that_leaves_ends_the_answer_first(serving: Any, client: Any) -> None:
    client.gate = asyncio.Event()
    server = serving()
    idle, busy = server.open(), server.open()
    ask(busy)
    wait_until(lambda: client.num_running == 1, "the answer")
    client._loop.call_soon_threadsafe(server.app.state.sockets.leave)
    assert closing(idle)[0] == 1012
    assert server.refusal()[0] == 503
    client.open()
    assert events(busy)[-1]["type"] == "response.completed"
    assert closing(busy)[0] == 1012


def test_each_message_has_its_line_in_the_log(serving: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="manta.access"):
        socket = serving().open(x_request_id="socket-7")
        ask(socket)
        ask(socket, model="unknown")
        assert [events(socket)[-1]["type"] for _ in range(2)] == ["response.completed", "error"]
        socket.close()
        wait_until(lambda: len(caplog.messages) == 3, "the socket's own line")
    lines = [line.split() for line in caplog.messages]
    assert [(line[0], line[1], line[2], line[-1]) for line in lines] == [
        ("POST", "/v1/responses", "200", "socket-7-1"),
        ("POST", "/v1/responses", "404", "socket-7-2"),
        ("GET", "/v1/responses", "101", "socket-7"),
    ]


def test_a_key_of_idempotency_is_not_that_of_each_message(serving: Any, client: Any) -> None:
    socket = serving().open(Idempotency_Key="once")
    for _ in range(2):
        ask(socket)
    ids = {events(socket)[0]["response"]["id"] for _ in range(2)}
    assert len(ids) == len(client.requests) == 2
