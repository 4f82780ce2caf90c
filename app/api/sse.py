"""Server-sent events: the response that writes an EventStream as it comes.

Whatever is ready leaves in one write, one event per engine output; the first is never held back. Until it has come no
status is sent, so that a request the engine refuses still gets its own status. A stream that breaks later ends in an
error event and [DONE], never in silence.
"""

from __future__ import annotations

import json
from json.encoder import encode_basestring as json_string
from typing import Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from app.api.errors import ClientDisconnected, as_manta_error, error_body, error_response
from app.api.events import Event, EventStream

__all__ = ["DONE", "EventFormat", "EventStreamResponse", "json_string"]

DONE = "data: [DONE]\n\n"


class EventFormat(Protocol):
    """How a dialect writes a stream. Every method returns finished SSE text, `data: ...` and two newlines."""

    def start(self) -> str:
        """What comes before the first event."""
        ...

    def event(self, event: Event) -> str:
        """One event; "" when there is nothing to say."""
        ...

    def end(self) -> str:
        """What comes after the last event."""
        ...


def error_event(error: Exception) -> str:
    """The end of a stream that broke."""
    return f"data: {json.dumps(error_body(as_manta_error(error)), ensure_ascii=False)}\n\n{DONE}"


class EventStreamResponse(Response):
    """Runs an EventStream and writes it in the words of `form`."""

    media_type = "text/event-stream"

    def __init__(self, stream: EventStream, form: EventFormat) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._stream = stream
        self._form = form

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Write the whole stream; returns early when the client leaves."""
        async with self._stream as stream:
            try:
                batch = await stream.next_batch()
            except ClientDisconnected:
                return
            except Exception as error:
                await error_response(as_manta_error(error))(scope, receive, send)
                return
            if stream.route.replica_id:
                self.headers["X-Manta-Replica"] = stream.route.replica_id
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            try:
                await self._write(batch, send)
            except ClientDisconnected:
                return
            except Exception as error:
                await _send_text(send, error_event(error))
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _write(self, batch: list[Event], send: Send) -> None:
        text = self._form.start()
        while batch:
            text += "".join(map(self._form.event, batch))
            if text:
                await _send_text(send, text)
            text = ""
            batch = await self._stream.next_batch()
        await _send_text(send, self._form.end())


async def _send_text(send: Send, text: str) -> None:
    await send({"type": "http.response.body", "body": text.encode(), "more_body": True})
