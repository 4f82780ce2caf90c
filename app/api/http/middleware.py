"""Middleware that every HTTP request passes: an id, limits on headers and body, one line in the access log, an answer
to any exception.

Pure ASGI: nothing is copied or buffered.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
import uuid
from collections.abc import Mapping
from itertools import chain
from types import MappingProxyType
from typing import NamedTuple

from starlette.datastructures import Headers, MutableHeaders
from starlette.routing import compile_path
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.api.http.errors import (
    BodyTimeoutError,
    BodyTooLargeError,
    EncodedBodyError,
    HeadersTooLargeError,
    as_manta_error,
    error_response,
)
from app.api.http.held_bytes import HeldBytes
from app.api.http.http10 import in_one_piece
from app.api.http.http_metrics import SWITCHING
from app.api.http.request_log import begin_record, end_record
from app.api.http.service_terms import BEGAN
from app.config.limits import RequestLimits
from app.errors import ServerOverloadedError
from app.telemetry.request_record import CURRENT

logger = logging.getLogger("manta.api")

_SAFE_ID = re.compile(r"[\x21-\x7e]{1,256}")
NO_STATUS = 499  # the client left before there was a status
REFUSED = 403
GONE_CODE = 1006  # how a websocket ends whose client said nothing (RFC 6455, 7.4.1)
_STARTS = frozenset({"http.response.start", "websocket.http.response.start", "websocket.accept"})
_NO_PATHS: Mapping[str, int] = MappingProxyType({})


def new_request_id(given: str | None) -> str:
    """The client's id where it is printable and of sane length, else a fresh one."""
    return given if given and _SAFE_ID.fullmatch(given) else uuid.uuid4().hex


class RequestContext:
    """Gives each request an id (`x-request-id`, echoed), turns surprises into a 500, and writes the access log. A
    websocket is one request, which ends when it is closed. Clients of HTTP/1.0 get whole answers."""

    def __init__(self, app: ASGIApp, *, is_counted: bool = True) -> None:
        """`is_counted`: the metrics of HTTP requests count what passes."""
        self._app = app
        self._is_counted = is_counted

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        if scope.get("http_version") == "1.0" and scope["type"] == "http":
            send = in_one_piece(send)
        scope.setdefault("method", "GET")  # the handshake's, which is all that a websocket has of a request
        state, headers = scope.setdefault("state", {}), Headers(scope=scope)
        state[BEGAN] = time.monotonic()
        state["request_id"] = new_request_id(headers.get("x-request-id"))
        record = begin_record(scope, headers)
        CURRENT.set(record)  # each request has a context of its own
        status = NO_STATUS

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] in _STARTS:
                status = message.get("status", SWITCHING)
                message.setdefault("headers", [])
                headers = MutableHeaders(scope=message)
                headers["request-id"] = state["request_id"]  # Anthropic's name of it
                if not getattr(scope["app"].state, "server_adds_request_id", False):
                    headers["x-request-id"] = state["request_id"]  # OpenAI's
            elif message["type"] == "websocket.close" and status == NO_STATUS:
                status = REFUSED  # by which servers answer then
            await send(message)

        async def receive_or_gone() -> Message:
            try:
                return await receive()
            except Exception as error:  # a proxy before this server was lost, or ends its calls when its client leaves
                logger.info("nothing more comes from a client: %s", type(error).__name__)
                return {"type": f"{scope['type']}.disconnect", "code": GONE_CODE}

        try:
            await self._app(scope, receive_or_gone, send_with_id)
        except Exception as error:
            if status != NO_STATUS:  # the response has begun: the server must cut the connection
                raise
            await error_response(as_manta_error(error), scope)(scope, receive, send_with_id)
        finally:
            if record is not None:
                end_record(record, scope, status, is_counted=self._is_counted)


class RequestLimit:
    """Refuses with a 503 what comes while `max_requests` are under way."""

    def __init__(self, app: ASGIApp, max_requests: int) -> None:
        self._app = app
        self._max_requests = max_requests
        self._num_requests = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] == "http" and self._num_requests >= self._max_requests:
            error = ServerOverloadedError(f"{self._num_requests} requests are under way here; try later")
            await error_response(error, scope)(scope, receive, send)
            return
        self._num_requests += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._num_requests -= 1


class HeaderLimit:
    """Refuses requests with too many headers, or too large ones, with a 431."""

    def __init__(self, app: ASGIApp, limits: RequestLimits) -> None:
        self._app = app
        self._limits = limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if "headers" in scope and (error := self._fault(scope["headers"])) is not None:
            await error_response(error, scope)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _fault(self, headers: list[tuple[bytes, bytes]]) -> HeadersTooLargeError | None:
        if len(headers) > self._limits.max_headers:
            return HeadersTooLargeError(f"{len(headers)} headers; at most {self._limits.max_headers}")
        num_bytes = sum(map(len, chain.from_iterable(headers)))
        if num_bytes > self._limits.max_header_bytes:
            return HeadersTooLargeError(f"headers of {num_bytes} bytes; at most {self._limits.max_header_bytes}")
        return None


class BodyTimes(NamedTuple):
    """Bounds the time in which a body comes, in seconds."""

    max_s: float  # in all
    gap_s: float  # in which nothing comes


class BodyLimit:
    """Refuses bodies above `max_bytes` with a 413, by their declared length or as soon as they exceed it, and with a
    408 those that do not come within `times`. `larger` are the bounds of paths that take more, with names in braces for
    what differs.

    The bodies of all requests in flight are counted in `held`: what finds no room there gets a 429, unless it is small.
    Those of `larger` paths do not count: they are not held in memory.
    """

    def __init__(
        self,
        app: ASGIApp,
        max_bytes: int,
        times: BodyTimes,
        held: HeldBytes,
        larger: Mapping[str, int] = _NO_PATHS,
    ) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._max_s, self._gap_s = times
        self._larger = [(compile_path(path)[0], most) for path, most in larger.items()]
        self._held = held

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        larger = next((most for path, most in self._larger if path.match(scope["path"])), None)
        max_bytes = self._max_bytes if larger is None else larger
        headers = Headers(scope=scope)
        encoding, length = headers.get("content-encoding", "").strip().lower(), headers.get("content-length", "")
        if encoding not in ("", "identity"):
            encoded = EncodedBodyError(f"the body is compressed: send it without content-encoding {encoding[:64]}")
            await error_response(encoded, scope)(scope, receive, send)
            return
        if length.isdigit() and int(length[:20]) > max_bytes:
            await error_response(_too_large(max_bytes), scope)(scope, receive, send)
            return
        deadline = asyncio.get_running_loop().time() + self._max_s
        num_bytes, holding = 0, self._held.begin(scope, scope.get("state", {}).get("tenant", ""))
        is_counted = larger is None
        is_whole = False  # then only the end of the connection is waited for, for as long as it takes

        async def receive_limited() -> Message:
            nonlocal num_bytes, is_whole
            message = await (receive() if is_whole else self._by(deadline, receive))
            if message["type"] == "http.request":
                is_whole = not message.get("more_body", False)
                num_new = len(message.get("body", b""))
                num_bytes += num_new
                if num_bytes > max_bytes:
                    raise _too_large(max_bytes)
                if is_counted and num_new:
                    holding.add(num_new)
            return message

        try:
            await self._app(scope, receive_limited, send)
        finally:
            holding.release()

    async def _by(self, deadline: float, receive: Receive) -> Message:
        gap_ends = asyncio.get_running_loop().time() + self._gap_s
        try:
            async with asyncio.timeout_at(min(deadline, gap_ends)):
                return await receive()
        except TimeoutError:
            if gap_ends < deadline:
                raise BodyTimeoutError(f"nothing more of the body came for {self._gap_s:g} s") from None
            raise BodyTimeoutError(f"the body did not come within {self._max_s:g} s") from None


def _too_large(max_bytes: int) -> BodyTooLargeError:
    return BodyTooLargeError(f"the body exceeds the limit of {max_bytes} bytes")
