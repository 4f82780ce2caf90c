"""Server-sent events: the response that writes Events as they come.

Whatever is ready leaves in one write, one event per engine output; the first is never held back. Until it has come no
status is sent, so that a request the engine refuses still gets its own status. A stream that breaks later ends in an
error event of its dialect, never in silence. While nothing is said, a keep-alive tells proxies and clients that the
stream lives; it also sends the status of a request that waits long for its turn.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from abc import ABC, abstractmethod
from json.encoder import encode_basestring as json_string
from types import TracebackType
from typing import Protocol, Self

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from app.api.engine_client import RouteInfo
from app.api.generation.events import Event
from app.api.http.errors import ClientDisconnected, as_manta_error, error_body, error_response
from app.api.http.json_response import utf8
from app.api.http.request_log import BROKEN
from app.errors import MantaError

__all__ = ["DONE", "EventFormat", "EventStreamResponse", "json_string"]

DONE = "data: [DONE]\n\n"
KEEP_ALIVE_S = 15.0


class Events(Protocol):
    """Gives a response what it writes: an EventStream, or who joins several. Leaving it ends what runs."""

    route: RouteInfo

    async def __aenter__(self) -> Self:
        """Begin."""
        ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None:
        """End."""
        ...

    async def next_batch(self) -> list[Event]:
        """Every event that is ready, at least one; [] at the end. Raises what broke the stream, ClientDisconnected."""
        ...


class EventFormat(ABC):
    """Writes a stream as a dialect has it. Every method returns finished SSE text, `data: ...` and two newlines."""

    @abstractmethod
    def start(self) -> str:
        """Returns what comes before the first event."""

    async def may_begin(self) -> None:
        """Returns once a keep-alive may send the status; what is wrong with the request before that keeps its own."""
        return

    @abstractmethod
    def event(self, event: Event) -> str:
        """One event; "" when there is nothing to say."""

    @abstractmethod
    def end(self) -> str:
        """Returns what comes after the last event."""

    async def finish(self) -> None:
        """Called once the last event has been written, before `end`: the time to keep what was said."""
        return

    def error(self, error: MantaError) -> str:
        """The end of a stream that broke."""
        return f"data: {json.dumps(error_body(error), ensure_ascii=False)}\n\n{DONE}"

    def keep_alive(self) -> str:
        """Says that the stream lives, and nothing else."""
        return ": keep-alive\n\n"


class EventStreamResponse(Response):
    """Runs Events and writes it in the words of `form`."""

    media_type = "text/event-stream"

    def __init__(self, stream: Events, form: EventFormat) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._stream = stream
        self._form = form
        self._has_begun = False
        self._has_status = False
        self._has_ended = False
        self._last_sent = 0.0
        self._sending = asyncio.Lock()  # between the stream and its keep-alives; whoever asks first sends first

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Write the whole stream; returns early when the client leaves."""
        async with self._stream:
            pulse = asyncio.create_task(self._pulse(_keep_alive_s(scope), send))
            try:
                # In a task of its own: here, each event would wake all the middleware that waits around this.
                await asyncio.create_task(self._write(send))
            except ClientDisconnected:
                return
            except Exception as error:
                described = as_manta_error(error)
                if not self._has_begun:
                    await error_response(described, scope)(scope, receive, send)
                    return
                scope.setdefault("state", {})[BROKEN] = True
                await self._send(self._form.error(described), send, is_last=True)
            finally:
                pulse.cancel()

    async def _write(self, send: Send) -> None:
        while batch := await self._stream.next_batch():
            await self._send(self._opening() + "".join(map(self._form.event, batch)), send)
        await self._form.finish()
        await self._send(self._opening() + self._form.end(), send, is_last=True)

    def _opening(self) -> str:
        """Returns what comes before the first event, the first time."""
        if self._has_begun:
            return ""
        self._has_begun = True
        return self._form.start()

    async def _pulse(self, interval_s: float, send: Send) -> None:
        """Send a keep-alive whenever nothing was sent for `interval_s`."""
        await self._form.may_begin()
        self._last_sent = time.monotonic()
        with contextlib.suppress(ClientDisconnected):
            while not self._has_ended:
                silent_s = time.monotonic() - self._last_sent
                if silent_s < interval_s:
                    await asyncio.sleep(interval_s - silent_s)
                else:
                    await self._send(self._opening() + self._form.keep_alive(), send)

    async def _send(self, text: str, send: Send, *, is_last: bool = False) -> None:
        """Send `text`; the status goes before the first, nothing comes behind the last."""
        async with self._sending:
            if self._has_ended:  # while a keep-alive waited for its turn
                return
            self._has_ended = is_last
            self._last_sent = time.monotonic()
            if not self._has_status:
                self._has_status = True
                if self._stream.route.replica_id:
                    self.headers["X-Manta-Replica"] = self._stream.route.replica_id
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            if text or is_last:
                await send({"type": "http.response.body", "body": utf8(text), "more_body": not is_last})


def _keep_alive_s(scope: Scope) -> float:
    seconds: float = getattr(scope["app"].state, "sse_keep_alive_s", KEEP_ALIVE_S) if "app" in scope else KEEP_ALIVE_S
    return seconds
