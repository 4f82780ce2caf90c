"""Requests to an ASGI application in this process: what a client would get, without a connection."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from starlette.types import ASGIApp, Message

_NOTHING: Mapping[str, Any] = MappingProxyType({})


@dataclass(slots=True, frozen=True)
class Answer:
    """The answer to a request in this process."""

    status: int
    raw: bytes
    request_id: str = ""
    retry_after_s: float | None = None

    @classmethod
    def of(cls, status: int, headers: dict[str, str], raw: bytes) -> Answer:
        """An answer as it was on the wire; `headers` have names in lower case."""
        after = headers.get("retry-after", "")
        request_id = headers.get("x-request-id") or headers.get("request-id", "")
        return cls(status, raw, request_id, float(after) if after.isdigit() else None)

    @property
    def body(self) -> Any:
        """Parses the body as JSON, or returns the text where it is none; parsed each time, which is work where it is
        long.
        """
        try:
            return json.loads(self.raw)
        except ValueError:
            return self.raw.decode("utf-8", "replace")


Post = Callable[[str, bytes, str], Awaitable[Answer]]  # path, JSON, tenant


async def post_in_process(app: ASGIApp, path: str, payload: bytes, scope: Mapping[str, Any] = _NOTHING) -> Answer:
    """The application's answer to a POST of JSON. `scope` adds to the connection's, as a server would."""
    status, headers, parts = 500, {}, []
    was_read = False

    async def receive() -> Message:
        nonlocal was_read
        if was_read:
            await asyncio.Event().wait()  # this client never leaves
        was_read = True
        return {"type": "http.request", "body": payload, "more_body": False}

    async def send(message: Message) -> None:
        nonlocal status, headers
        if message["type"] == "http.response.start":
            status = message["status"]
            headers = {name.decode().lower(): value.decode() for name, value in message["headers"]}
        else:
            parts.append(message.get("body", b""))

    await app(_scope(path, len(payload)) | dict(scope), receive, send)
    return Answer.of(status, headers, b"".join(parts))


def _scope(path: str, length: int) -> dict[str, Any]:
    headers = [(b"host", b"localhost"), (b"content-type", b"application/json"), (b"content-length", b"%d" % length)]
    return {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http",
        "path": path, "raw_path": path.encode(), "query_string": b"", "root_path": "", "headers": headers,
        "client": ("127.0.0.1", 0), "server": ("localhost", 80),
    }  # fmt: skip
