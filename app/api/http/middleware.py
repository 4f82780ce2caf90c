"""What every HTTP request passes: an id, limits on headers and body, one line in the access log, an answer to any
exception.

Pure ASGI: nothing is copied or buffered.
"""

from __future__ import annotations

import asyncio
import re
import time
import uuid
from collections import Counter
from collections.abc import Mapping
from types import MappingProxyType

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.api.errors import BodyTimeoutError, BodyTooLargeError, HeadersTooLargeError, as_manta_error, error_response
from app.api.request_log import begin_record, end_record
from app.api.service_terms import BEGAN
from app.config import RequestLimits
from app.errors import OverloadedError, ServerOverloadedError
from app.telemetry.request_record import CURRENT

_SAFE_ID = re.compile(r"[\x21-\x7e]{1,256}")
NO_STATUS = 499  # the client left before there was a status
_NO_PATHS: Mapping[str, int] = MappingProxyType({})
SMALL_BODY_BYTES = 1 << 16


def new_request_id(given: str | None) -> str:
    """The client's id where it is printable and of sane length, else a fresh one."""
    return given if given and _SAFE_ID.fullmatch(given) else uuid.uuid4().hex


class RequestContext:
    """Gives each request an id (`x-request-id`, echoed), turns surprises into a 500, and writes the access log."""

    def __init__(self, app: ASGIApp, *, is_counted: bool = True) -> None:
        """`is_counted`: the metrics of HTTP requests count what passes."""
        self._app = app
        self._is_counted = is_counted

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        state, headers = scope.setdefault("state", {}), Headers(scope=scope)
        state[BEGAN] = time.monotonic()
        state["request_id"] = new_request_id(headers.get("x-request-id"))
        record = begin_record(scope, headers)
        CURRENT.set(record)  # each request has a context of its own
        status = NO_STATUS

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers["request-id"] = state["request_id"]  # Anthropic's name of it
                if not getattr(scope["app"].state, "server_adds_request_id", False):
                    headers["x-request-id"] = state["request_id"]  # OpenAI's
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
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
        if scope["type"] == "http" and (error := self._fault(scope["headers"])) is not None:
            await error_response(error, scope)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _fault(self, headers: list[tuple[bytes, bytes]]) -> HeadersTooLargeError | None:
        if len(headers) > self._limits.max_headers:
            return HeadersTooLargeError(f"{len(headers)} headers; at most {self._limits.max_headers}")
        num_bytes = sum(len(name) + len(value) for name, value in headers)
        if num_bytes > self._limits.max_header_bytes:
            return HeadersTooLargeError(f"headers of {num_bytes} bytes; at most {self._limits.max_header_bytes}")
        return None


class BodyLimit:
    """Refuses bodies above `max_bytes` with a 413, by their declared length or as soon as they exceed it, and with a
    408 those that have not come in `max_s` seconds. `larger` are the bounds of paths that take more.

    The bodies of all requests in flight may have `max_total_bytes`, those of one tenant half of that: what exceeds them
    gets a 429, unless it is small. Those of `larger` paths do not count: they are not held in memory.
    """

    def __init__(
        self, app: ASGIApp, max_bytes: int, max_s: float, max_total_bytes: int, larger: Mapping[str, int] = _NO_PATHS
    ) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._max_s = max_s
        self._larger = larger
        self._max_total_bytes = max_total_bytes
        self._held: Counter[str] = Counter()  # bytes of each tenant

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        max_bytes = self._larger.get(scope["path"], self._max_bytes)
        length = Headers(scope=scope).get("content-length", "")
        if length.isdigit() and int(length[:20]) > max_bytes:
            await error_response(_too_large(max_bytes), scope)(scope, receive, send)
            return
        deadline = asyncio.get_running_loop().time() + self._max_s
        num_bytes, tenant = 0, scope.get("state", {}).get("tenant", "")
        is_counted = scope["path"] not in self._larger
        is_whole = False  # then only the end of the connection is waited for, for as long as it takes

        async def receive_limited() -> Message:
            nonlocal num_bytes, is_whole
            message = await (receive() if is_whole else self._by(deadline, receive))
            if message["type"] == "http.request":
                is_whole = not message.get("more_body", False)
                num_bytes += len(message.get("body", b""))
                self._held[tenant] += is_counted * len(message.get("body", b""))
                if num_bytes > max_bytes:
                    raise _too_large(max_bytes)
                if is_counted and num_bytes > SMALL_BODY_BYTES:
                    self._check_total(tenant)
            return message

        try:
            await self._app(scope, receive_limited, send)
        finally:
            self._held[tenant] -= is_counted * num_bytes
            if not self._held[tenant]:
                del self._held[tenant]

    def _check_total(self, tenant: str) -> None:
        total = self._held.total()
        if total > self._max_total_bytes or self._held[tenant] > self._max_total_bytes // 2:
            raise OverloadedError(f"the bodies of requests in flight have {total} bytes together; try later")

    async def _by(self, deadline: float, receive: Receive) -> Message:
        try:
            async with asyncio.timeout_at(deadline):
                return await receive()
        except TimeoutError:
            raise BodyTimeoutError(f"the body did not come within {self._max_s:g} s") from None


def _too_large(max_bytes: int) -> BodyTooLargeError:
    return BodyTooLargeError(f"the body exceeds the limit of {max_bytes} bytes")
