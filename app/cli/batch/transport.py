"""Sends the requests of a batch: to a server, or to an application in this process."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any, Protocol

from starlette.types import ASGIApp

from app.api.http.in_process import Answer, post_in_process
from app.cli.stream_client import Server

TIMEOUT_S = 6 * 3600.0


class UnreachableError(Exception):
    """No answer came; the request may be sent again."""


class Transport(Protocol):
    """Somewhere to post to."""

    async def post(self, path: str, body: bytes) -> Answer:
        """The answer to JSON, whatever its status. UnreachableError when there is none."""
        ...

    def close(self) -> None:
        """Release threads and engines."""
        ...


class HttpTransport:
    """A server; one thread for each request under way, which nobody waits for when the run is interrupted."""

    def __init__(self, server: Server) -> None:
        self._server = server

    async def post(self, path: str, body: bytes) -> Answer:
        """See Transport."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Answer] = loop.create_future()

        def settle(answer: Answer | None, error: UnreachableError | None) -> None:
            if future.cancelled():
                return
            if answer is not None:
                future.set_result(answer)
            elif error is not None:
                future.set_exception(error)

        def work() -> None:
            answer, failure = None, None
            try:
                answer = self._post(path, body)
            except UnreachableError as error:
                failure = error
            with contextlib.suppress(RuntimeError):  # the loop was closed: the run is over
                loop.call_soon_threadsafe(settle, answer, failure)

        threading.Thread(target=work, name="batch", daemon=True).start()
        return await future

    def close(self) -> None:
        """See Transport."""

    def _post(self, path: str, body: bytes) -> Answer:
        headers = {**self._server.headers(), "Content-Type": "application/json"}
        request = urllib.request.Request(self._server.base + path, body, headers)
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
                return Answer.of(response.status, _lower(response.headers), response.read())
        except urllib.error.HTTPError as error:
            with error:
                return Answer.of(error.code, _lower(error.headers), error.read())
        except Exception as error:  # URLError, a connection that was cut, a body that broke off
            raise UnreachableError(str(getattr(error, "reason", error)) or type(error).__name__) from error


class AsgiTransport:
    """An application in this process. `check` raises when it can answer no more."""

    def __init__(self, app: ASGIApp, check: Callable[[], None], close: Callable[[], None]) -> None:
        self._app = app
        self._check = check
        self._close = close

    async def post(self, path: str, body: bytes) -> Answer:
        """See Transport."""
        answer = await post_in_process(self._app, path, body)
        if answer.status >= 500:
            self._check()
        return answer

    def close(self) -> None:
        """See Transport."""
        self._close()


def _lower(headers: Any) -> dict[str, str]:
    return {name.lower(): value for name, value in headers.items()}
