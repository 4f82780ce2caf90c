"""Websockets whose two sides speak at the same time: a session takes a client's events as they come, and sends its own
when it has something to say.

What bounds other websockets (app/api/http/sockets.py) bounds these: how many are open, how long one is idle and how
long it lives. An event is bounded like a body, and counts as held while it is read; what a session keeps it counts by
itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from starlette.datastructures import QueryParams
from starlette.types import ASGIApp, Receive, Scope, Send

from app.api.http.body import check_shape
from app.api.http.errors import as_manta_error
from app.api.http.held_bytes import HeldBytes, Holding
from app.api.http.socket_posts import BROKEN, GOING_AWAY, LEAVE, RESTART, Events, SocketAgeError, post_scope
from app.api.http.work_pool import RequestWork
from app.config.ingress import IngressConfig
from app.config.limits import RequestLimits
from app.errors import InvalidRequestError, MantaError

logger = logging.getLogger("manta.api")


@dataclass(slots=True)
class LivePeer:
    """Lets a session speak to its client, and ask the server's own routes in its name."""

    query: QueryParams  # of the address
    work: RequestWork
    holding: Holding  # of what the session keeps
    max_s: float  # of its life
    _app: ASGIApp
    _scope: Scope
    _send: Send
    _num_posts: int = 0

    async def send(self, event: Mapping[str, Any]) -> None:
        """Send an event; nothing happens where the client is gone, of which `take` hears no more."""
        with contextlib.suppress(OSError):
            await self._send({"type": "websocket.send", "text": json.dumps(event, ensure_ascii=False)})

    async def post(self, path: str, content_type: str, body: bytes, heard: Callable[[str], Awaitable[None]]) -> None:
        """POST to a route, as if the client had: `heard` is given the data of each event of the answer, of a refusal
        one of type `error`."""
        self._num_posts += 1
        scope = post_scope(self._scope, path, content_type, len(body), self._num_posts, {})
        messages = iter(({"type": "http.request", "body": body, "more_body": False},))

        async def receive() -> Any:
            message = next(messages, None)
            return message if message is not None else await asyncio.Future()

        await self._app(scope, receive, Events(scope, heard))


class LiveSession(ABC):
    """One client's session."""

    @property
    @abstractmethod
    def is_busy(self) -> bool:
        """True while it has something to say yet."""

    @abstractmethod
    async def open(self) -> None:
        """The client is there."""

    @abstractmethod
    async def take(self, event: Mapping[str, Any]) -> None:
        """One event of the client. Must not wait for answers: the next one comes behind it."""

    @abstractmethod
    async def finish(self) -> None:
        """Wait until all is said."""

    @abstractmethod
    async def refuse(self, error: MantaError, event: Mapping[str, Any]) -> None:
        """Say what is wrong with an event, or with the session."""

    @abstractmethod
    async def close(self) -> None:
        """The client is gone, or is to be."""


MakeSession = Callable[[LivePeer, RequestLimits], LiveSession]


class LiveSocket:
    """One connection."""

    def __init__(
        self,
        app: ASGIApp,
        scope: Scope,
        receive: Receive,
        send: Send,
        make: MakeSession,
        held: HeldBytes,
        limits: RequestLimits,
        ingress: IngressConfig,
    ) -> None:
        self._receive, self._send, self._ingress = receive, send, ingress
        self._limits, self._holding = limits, Holding(held, scope["state"]["tenant"])
        state, tenant = scope["app"].state, scope["state"]["tenant"]
        work = RequestWork(state.work_pool, tenant, None, state.process_pool, self._holding)
        query = QueryParams(scope.get("query_string", b""))
        self._peer = LivePeer(query, work, self._holding, ingress.max_socket_s, app, scope, send)
        self._session = make(self._peer, limits)
        self._leaving = asyncio.Event()

    def leave(self) -> None:
        """End once all is said."""
        self._leaving.set()

    async def serve(self) -> None:
        """Take events until one side closes."""
        if (await self._receive())["type"] != "websocket.connect":
            return
        await self._send({"type": "websocket.accept"})
        code: int | None = BROKEN
        reason = "internal error"
        try:
            await self._session.open()
            code, reason = await self._read()
        except Exception:
            logger.exception("a websocket broke")
        finally:
            await self._session.close()
            self._holding.release()
        if code is not None:
            with contextlib.suppress(OSError):  # it has just gone by itself
                await self._send({"type": "websocket.close", "code": code, "reason": reason})

    async def _read(self) -> tuple[int | None, str]:
        """The code and reason of a close; None where the client has closed."""
        now = asyncio.get_running_loop().time
        ends_at, idle_at = now() + self._ingress.max_socket_s, now() + self._ingress.socket_idle_s
        leaving = asyncio.ensure_future(self._leaving.wait())
        receiving = asyncio.ensure_future(self._receive())
        try:
            while True:
                left = max(0.0, min(ends_at, idle_at) - now())
                done, _ = await asyncio.wait((leaving, receiving), timeout=left, return_when=asyncio.FIRST_COMPLETED)
                if leaving in done:
                    await self._session.finish()
                    return RESTART, "the server is about to end"
                if receiving in done:
                    message = receiving.result()
                    if message["type"] == "websocket.disconnect":
                        return None, ""
                    receiving = asyncio.ensure_future(self._receive())
                    idle_at = now() + self._ingress.socket_idle_s
                    if message["type"] == LEAVE:
                        self.leave()
                    else:
                        await self._take(message)
                elif now() >= ends_at:
                    age = SocketAgeError(f"this websocket is {self._ingress.max_socket_s:g} s old: open another")
                    await self._session.refuse(age, {})
                    return GOING_AWAY, "too old"
                elif now() < idle_at:
                    continue  # timers may be early by a tick
                elif self._session.is_busy:
                    idle_at = now() + self._ingress.socket_idle_s
                else:
                    return GOING_AWAY, f"idle for {self._ingress.socket_idle_s:g} s"
        finally:
            for task in (leaving, receiving):
                task.cancel()
            await asyncio.gather(leaving, receiving, return_exceptions=True)

    async def _take(self, message: Mapping[str, Any]) -> None:
        text, raw = message.get("text"), message.get("bytes")
        payload = raw or b"" if text is None else text.encode()
        event: dict[str, Any] = {}
        is_counted = self._holding.grow(len(payload))
        try:
            if len(payload) > (most := self._limits.max_body_bytes):
                raise InvalidRequestError(f"an event has at most {most} bytes, not {len(payload)}")
            event = _read_event(payload, self._limits.max_json_depth)
            await self._session.take(event)
        except Exception as error:
            await self._session.refuse(as_manta_error(error), event)
        finally:
            if is_counted:
                self._holding.give_back(len(payload))


def _read_event(payload: bytes, max_depth: int) -> dict[str, Any]:
    """The JSON object; InvalidRequestError where there is none."""
    check_shape(payload, max_depth, "event")
    try:
        event = json.loads(payload)
    except ValueError as error:
        raise InvalidRequestError(f"the event is no JSON: {error}") from error
    if not isinstance(event, dict):
        raise InvalidRequestError("the event must be a JSON object")
    return event
