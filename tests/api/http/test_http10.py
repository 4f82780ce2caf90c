"""An HTTP/1.0 client gets its answer whole and with its length; any other one as the application wrote it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route
from starlette.types import Message

from app.api.http.middleware import RequestContext


async def streamed(request: Request) -> StreamingResponse:
    async def pieces() -> Any:
        for piece in (b"one ", b"two ", b"three"):
            yield piece

    return StreamingResponse(pieces(), media_type="text/plain")


@pytest.mark.parametrize(("version", "num_bodies", "length"), [("1.0", 1, b"13"), ("1.1", 4, None)])
def test_answers(version: str, num_bodies: int, length: bytes | None) -> None:
    sent: list[Message] = []

    async def receive() -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    async def send(message: Message) -> None:
        sent.append(message)

    app = Starlette(routes=[Route("/", streamed)])
    app.add_middleware(RequestContext)
    scope = {"type": "http", "http_version": version, "method": "GET", "path": "/", "headers": [], "asgi": {}}
    asyncio.run(app(scope, receive, send))
    start, *bodies = sent
    assert dict(start["headers"]).get(b"content-length") == length
    assert len(bodies) == num_bodies
    assert b"".join(body["body"] for body in bodies) == b"one two three"
