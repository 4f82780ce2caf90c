"""uvicorn's websockets: an answer to what asks for one and is no handshake, bounds on what comes in part, and a server
that ends lets the application end them.

A message is the application's once it is whole. What has come of others is counted here, over all websockets: it is
held for as long as their clients like.
"""

from __future__ import annotations

import logging
from typing import Any, ClassVar

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import Frame

from app.api.http.errors import error_body
from app.api.http.held_bytes import SMALL_BYTES
from app.api.http.json_response import JSONResponse
from app.api.http.socket_posts import LEAVE
from app.errors import InvalidRequestError

MAX_REASON = 200  # characters; it may repeat what was sent
MAX_FRAMES = 4096  # of one message: an empty one costs memory, too
MAX_UNFINISHED_BYTES = 256 << 20  # of messages that have come in part, beside small ones
TOO_BIG, TRY_LATER = 1009, 1013  # RFC 6455, 7.4.1, and IANA's table

logger = logging.getLogger("manta.api")


class WebSocketProtocol(WebSocketsSansIOProtocol):
    """Refuses with a 400 what cannot be read as a handshake: a POST, one with a body, a header of many kilobytes.

    uvicorn notices it and waits for more, until a proxy before it ends the connection.
    """

    unfinished: ClassVar[dict[WebSocketProtocol, int]] = {}  # bytes of messages that have come in part

    def data_received(self, data: bytes) -> None:
        """Called with the request first, then with what the client sends."""
        super().data_received(data)
        if self.transport.is_closing():
            return
        if not self.handshake_initiated and self.conn.handshake_exc is not None:
            reason = str(self.conn.handshake_exc.__cause__ or self.conn.handshake_exc)[:MAX_REASON]
            logger.info("no websocket handshake: %s", reason)
            self.transport.write(_refusal(f"this is no websocket handshake: {reason}"))
            self.transport.close()
        elif not self._count_unfinished():
            self._fail(TRY_LATER, "messages that have come in part take too much memory")

    def handle_cont(self, event: Frame) -> None:
        """Called with each further frame of a message."""
        super().handle_cont(event)
        if len(self.frames) > MAX_FRAMES:
            self._fail(TOO_BIG, f"more than {MAX_FRAMES} frames")

    def connection_lost(self, exc: Exception | None) -> None:
        """Called once, at the end."""
        self.unfinished.pop(self, None)
        super().connection_lost(exc)

    def shutdown(self) -> None:
        """Called when the server begins to end: an answer may be under way, which the application ends first."""
        if self.handshake_complete and not self.close_sent:
            message: Any = {"type": LEAVE}  # ours: ASGI has none for it
            self.queue.put_nowait(message)
        else:
            super().shutdown()

    def _count_unfinished(self) -> bool:
        """Count what has come of a message; False where there is no room for it."""
        num_bytes = len(self.conn.reader.buffer) + (self.conn.current_size or 0)
        if num_bytes <= SMALL_BYTES:
            self.unfinished.pop(self, None)
            return True
        self.unfinished[self] = num_bytes
        return sum(self.unfinished.values()) <= MAX_UNFINISHED_BYTES

    def _fail(self, code: int, reason: str) -> None:
        """Close the websocket without waiting for the client."""
        if self.transport.is_closing():
            return
        self.conn.fail(code, reason)
        self.transport.write(b"".join(self.conn.data_to_send()))
        self.close_sent = True
        self.transport.close()


def _refusal(message: str) -> bytes:
    """A whole HTTP answer: there is no application to give it."""
    response = JSONResponse(error_body(InvalidRequestError(message)), 400, headers={"connection": "close"})
    head = b"".join(b"%s: %s\r\n" % pair for pair in response.raw_headers)
    return b"HTTP/1.1 400 Bad Request\r\n" + head + b"\r\n" + bytes(response.body)
