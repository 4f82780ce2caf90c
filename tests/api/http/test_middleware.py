"""Request ids, the access log, HTTP/1.0, and bodies that do not come."""

from __future__ import annotations

import json
import logging
import socket
from http.client import HTTPResponse
from typing import Any

import httpx
import pytest

from app.api.server.app import create_app
from app.config.limits import RequestLimits
from tests import limits
from tests.api.conftest import Server


def test_the_client_s_request_id_is_echoed(http: httpx.Client) -> None:
    assert http.get("/version", headers={"x-request-id": "abc-1"}).headers["x-request-id"] == "abc-1"
    assert http.get("/nowhere", headers={"x-request-id": "abc-2"}).headers["x-request-id"] == "abc-2"
    first, second = (http.get("/version").headers["x-request-id"] for _ in range(2))
    assert first != second
    assert len(http.get("/version", headers={"x-request-id": "x" * 300}).headers["x-request-id"]) == 32


def test_pages_of_other_origins_may_not_call(http: httpx.Client) -> None:
    """A page that a user happens to visit must not use a server that only this user can reach."""
    origin = {"origin": "http://page.example"}
    asked = {**origin, "access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    assert http.options("/v1/chat/completions", headers=asked).status_code == 405
    assert "access-control-allow-origin" not in http.get("/v1/models", headers=origin).headers


def test_one_line_a_request(http: httpx.Client, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="manta.access"):
        http.get("/version", headers={"x-request-id": "line-1"})
        http.post("/v1/completions", json={"prompt": "secret words", "foo": 1}, headers={"x-request-id": "line-2"})
        http.get("/health")
    lines = [record.getMessage() for record in caplog.records if record.name == "manta.access"]
    assert len(lines) == 2, "health checks do not fill the log"
    assert lines[0].startswith("GET /version 200 ")
    assert lines[0].endswith(" line-1")
    assert lines[1].startswith("POST /v1/completions 400 ")
    assert "secret" not in "".join(lines)


def test_a_server_that_names_requests_itself_is_not_repeated(client: Any) -> None:
    """Ray Serve adds `x-request-id` to every answer; ours would be a second one."""
    app = create_app(client, RequestLimits())
    app.state.server_adds_request_id = True
    with Server(app) as server:
        answer = httpx.get(f"{server.url}/version", headers={"x-request-id": "abc-1"})
    assert answer.headers["request-id"] == "abc-1"
    assert "x-request-id" not in answer.headers


def exchange(server: Server, data: bytes) -> bytes:
    """What comes back for `data`, until the server closes the connection."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=limits.patience_s()) as connection:
        connection.sendall(data)
        received = b""
        while piece := connection.recv(65536):
            received += piece
    return received


@pytest.mark.parametrize("stream", [False, True])
def test_http_1_0_gets_no_chunks(client: Any, stream: bool) -> None:
    body = json.dumps({"prompt": "hello", "max_tokens": 5, "stream": stream}).encode()
    head = b"POST /v1/completions HTTP/1.0\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    with Server(create_app(client, RequestLimits())) as server:
        headers, _, content = exchange(server, head % len(body) + body).partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in headers.lower()
    assert b"content-length: %d\r\n" % len(content) in headers.lower() + b"\r\n"
    if stream:
        assert content.startswith(b"data: {")
        assert content.endswith(b"data: [DONE]\n\n")
    else:
        assert json.loads(content)["choices"][0]["finish_reason"]


def answer_of(connection: socket.socket) -> tuple[int, bytes]:
    """The status and the whole body of what comes next, in however many parts."""
    response = HTTPResponse(connection)
    response.begin()
    return response.status, response.read()


def test_a_stalled_body_is_refused(client: Any) -> None:
    """A body half sent holds its place for `max_body_s`; an answer that takes longer than that is not touched."""
    limit_s = round(limits.scaled_s(0.3), 1)
    client.delay_s = limit_s / 3
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 400\r\n\r\n"
    with Server(create_app(client, RequestLimits(max_body_s=limit_s))) as server:
        with socket.create_connection(("127.0.0.1", server.port), timeout=limits.patience_s()) as connection:
            connection.sendall(head + b'{"prompt": ')
            status, answer = answer_of(connection)
        body = {"prompt": "hello " * 5, "max_tokens": 8}
        whole = httpx.post(f"{server.url}/v1/completions", json=body, timeout=limits.patience_s())
    assert status == 408
    assert b"%g s" % limit_s in answer
    assert whole.status_code == 200
    assert whole.elapsed.total_seconds() > limit_s


def test_a_body_that_keeps_coming_may_take_longer_than_a_silence(client: Any) -> None:
    gap_s = round(limits.scaled_s(0.5), 1)
    body = b'{"prompt": "hello", "max_tokens": 2}'
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    with (
        Server(create_app(client, RequestLimits(max_body_gap_s=gap_s))) as server,
        socket.create_connection(("127.0.0.1", server.port), timeout=limits.patience_s()) as connection,
    ):
        connection.sendall(head % len(body))
        for start in range(0, len(body), 6):
            limits.pause(0.1)
            connection.sendall(body[start : start + 6])
        assert answer_of(connection)[0] == 200
        connection.sendall(head % 400 + b"{")
        status, answer = answer_of(connection)
    assert status == 408
    assert b"nothing more of the body came for %g s" % gap_s in answer


@pytest.mark.parametrize(
    ("path", "headers"),
    [
        ("/v1/completions", {"content-type": "application/json"}),
        ("/v1/completions", {"content-type": "application/json", "idempotency-key": "k"}),
        ("/v1/files", {"content-type": "multipart/form-data; boundary=x"}),
    ],
)
@pytest.mark.parametrize("is_raised", [True, False])
def test_a_client_that_leaves_while_its_body_is_read_is_no_error(
    client: Any, caplog: pytest.LogCaptureFixture, path: str, headers: dict[str, str], is_raised: bool
) -> None:
    """Behind Ray's own proxy the call for the next part is cancelled, which is an error of Ray's."""
    raw = [(name.encode(), value.encode()) for name, value in {"host": "x", **headers}.items()]
    scope = {"type": "http", "method": "POST", "path": path, "query_string": b"", "headers": raw, "root_path": ""}
    parts: list[Any] = [{"type": "http.request", "body": b"--x\r\n", "more_body": True}]
    sent = []

    async def receive() -> Any:
        if parts:
            return parts.pop()
        if is_raised:
            raise ConnectionResetError("the task was cancelled")
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    limits.run(create_app(client, RequestLimits())(scope, receive, send))
    assert [message["status"] for message in sent if "status" in message] in ([], [499])
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []
