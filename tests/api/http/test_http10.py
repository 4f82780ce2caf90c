"""An HTTP/1.0 client gets its answer whole and with its length; any other one as the application wrote it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from starlette.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from app.api.http.http10 import WholeAnswers


async def streamed(scope: Scope, receive: Receive, send: Send) -> None:
    async def pieces() -> Any:
        for piece in (b"one ", b"two ", b"three"):
            yield piece

    await StreamingResponse(pieces(), media_type="text/plain")(scope, receive, send)


@pytest.mark.parametrize(("version", "num_bodies", "length"), [("1.0", 1, b"13"), ("1.1", 4, None)])
def test_answers(version: str, num_bodies: int, length: bytes | None) -> None:
    sent: list[Message] = []

    async def receive() -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    async def send(message: Message) -> None:
        sent.append(message)

    scope = {"type": "http", "http_version": version, "method": "GET", "path": "/", "headers": [], "asgi": {}}
    asyncio.run(WholeAnswers(streamed)(scope, receive, send))
    start, *bodies = sent
    assert dict(start["headers"]).get(b"content-length") == length
    assert len(bodies) == num_bodies
    assert b"".join(body["body"] for body in bodies) == b"one two three"
