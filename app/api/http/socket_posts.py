"""A message of a websocket as a POST to the server's own routes, and the events of its answer.

It takes the way of every other request: limits on bodies, routes, access log and metrics are those of HTTP, and a
refusal is an event `error` with the status that the POST would have had.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from starlette.datastructures import Headers
from starlette.types import Message, Scope

from app.errors import InvalidRequestError

GOING_AWAY, POLICY, BROKEN, RESTART = 1001, 1008, 1011, 1012  # RFC 6455, 7.4.1, and IANA's table
LEAVE = "manta.leave"  # type of a message to the application: the server begins to end
ECHOED = "echoed"  # in a request's state: fields that all its events repeat
# Headers of the handshake that belong to the connection, or to one message only.
_NOT_OF_MESSAGES = frozenset(
    {b"connection", b"content-length", b"content-type", b"idempotency-key", b"transfer-encoding", b"upgrade"}
)
_OF_HANDSHAKE = b"sec-websocket-"


class SocketAgeError(InvalidRequestError):
    """The websocket has lived as long as one may; clients open another."""

    code = "websocket_connection_limit_reached"


def post_scope(
    socket: Scope, path: str, content_type: str, length: int, number: int, state: Mapping[str, Any]
) -> dict[str, Any]:
    """The scope of a request that comes by a websocket: its number-th."""
    request_id = f"{socket['state']['request_id']}-{number}".encode()
    kept = [
        (name, value)
        for name, value in socket["headers"]
        if name not in _NOT_OF_MESSAGES and not name.startswith(_OF_HANDSHAKE) and name != b"x-request-id"
    ]
    own = [(b"content-type", content_type.encode()), (b"content-length", b"%d" % length)]
    names = ("app", "asgi", "scheme", "query_string", "root_path", "client", "server")
    shared = {name: socket[name] for name in names if name in socket}
    return shared | {
        "type": "http",
        "http_version": "1.1",
        "method": "POST",
        "path": path,
        "raw_path": path.encode(),
        "headers": [*kept, *own, (b"x-request-id", request_id)],
        "state": dict(state),
    }


class Events:
    """Takes the messages of an HTTP answer: sends each of its events, or what refuses the request as one."""

    def __init__(self, scope: Scope, send_event: Callable[[str], Awaitable[None]]) -> None:
        self._state: dict[str, Any] = scope["state"]
        self._send_event = send_event
        self._status = 0
        self._headers = Headers()
        self._is_stream = False
        self._unsent = b""

    async def __call__(self, message: Message) -> None:
        """Take one ASGI message."""
        if message["type"] == "http.response.start":
            self._status = message["status"]
            self._headers = Headers(raw=message["headers"])
            self._is_stream = self._headers.get("content-type", "").startswith("text/event-stream")
            return
        self._unsent += message.get("body", b"")
        if self._is_stream:
            *events, self._unsent = self._unsent.split(b"\n\n")
            for event in events:
                await self._send_data(event)
        elif not message.get("more_body", False) and self._unsent:
            retry = {name: value for name, value in self._headers.items() if name.startswith("retry-after")}
            await self._send_event(self._with_echo(error_event(json.loads(self._unsent), self._status, retry)))

    async def _send_data(self, event: bytes) -> None:
        """Send the data of an event; comments, which keep connections alive, have none."""
        for line in event.split(b"\n"):
            if line.startswith(b"data: "):
                await self._send_event(self._with_echo(line[len(b"data: ") :].decode()))

    def _with_echo(self, text: str) -> str:
        echoed: dict[str, str] = self._state.get(ECHOED) or {}
        return text if not echoed else f"{{{json.dumps(echoed, ensure_ascii=False)[1:-1]}, {text[1:]}"


def error_event(body: dict[str, Any], status: int, headers: dict[str, str]) -> str:
    """The event of a refusal. OpenAI's newer SDKs read `error`, older ones the fields beside it."""
    error = body["error"]
    beside = {name: error[name] for name in ("code", "message", "param")}
    described = error | {"headers": headers} if headers else error
    event = {"type": "error", "status": status, "sequence_number": 0, **beside, "error": described}
    return json.dumps(event, ensure_ascii=False)
