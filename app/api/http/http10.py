"""Whole answers for HTTP/1.0, which knows no chunks: its clients would read their frames as text.

The servers that run the application (uvicorn with httptools) put every body of unknown length into chunks, and proxies
pass them on. So an answer to such a client waits until its end is there, and says its length.
"""

from __future__ import annotations

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send


class WholeAnswers:
    """Sends an HTTP/1.0 client its answer in one piece, streams included."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] != "http" or scope.get("http_version") != "1.0":
            await self._app(scope, receive, send)
            return
        start: Message = {}
        pieces: list[bytes] = []

        async def collect(message: Message) -> None:
            if message["type"] == "http.response.start":
                start.update(message)
                return
            pieces.append(message.get("body", b""))
            if not message.get("more_body", False):
                body = b"".join(pieces)
                MutableHeaders(scope=start).setdefault("content-length", str(len(body)))
                await send(start)
                await send({"type": "http.response.body", "body": body})

        await self._app(scope, receive, collect)
