"""Whole answers for HTTP/1.0, which knows no chunks: its clients would read their frames as text.

The servers that run the application (uvicorn with httptools) put every body of unknown length into chunks, and proxies
pass them on. So an answer to such a client waits until its end is there, and says its length.
"""

from __future__ import annotations

from starlette.datastructures import MutableHeaders
from starlette.types import Message, Send


def in_one_piece(send: Send) -> Send:
    """Makes of `send` one that keeps an answer until all of it is there, streams included."""
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

    return collect
