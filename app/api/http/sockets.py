"""Websockets: each message of a client is a POST to the same path, each event of the answer a message back.

A message takes the way of every other request, from the check of its key on: limits on bodies, routes, access log and
metrics are those of HTTP, and a refusal is an event `error` with the status that the POST would have had. Messages of
one socket are answered one after another. What a socket holds while no answer is under way is bounded here: how many
there are, how long one is idle and how long it lives, and how many messages wait in it. The server before this one
hands messages over as they come, so they are read at once and counted.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.api.http.errors import error_body, error_response
from app.api.http.held_bytes import HeldBytes, Holding
from app.api.http.live_sockets import LiveSocket, MakeSession
from app.api.http.origin import check_origin
from app.api.http.socket_posts import (
    BROKEN,
    GOING_AWAY,
    LEAVE,
    POLICY,
    RESTART,
    Events,
    SocketAgeError,
    error_event,
    post_scope,
)
from app.config.ingress import IngressConfig
from app.config.limits import RequestLimits
from app.errors import MantaError, OverloadedError, ServerOverloadedError

logger = logging.getLogger("manta.api")

MAX_WAITING = 16  # messages that wait for the answer to the one before them
_SOCKET = "socket"  # in a request's state


class Memory(Protocol):
    """Keeps what later messages of a socket may name."""

    def clear(self) -> None:
        """Forget all of it."""
        ...


@dataclass(slots=True)
class SocketState:
    """Holds what the messages of one socket share."""

    held: HeldBytes
    max_bytes: int  # of one message, and of a conversation
    memory: Memory | None = None


def socket_of(connection: HTTPConnection) -> SocketState | None:
    """Returns what the socket holds that a request came by; None where it came by itself."""
    found: SocketState | None = connection.scope.get("state", {}).get(_SOCKET)
    return found


class OpenSockets:
    """The websockets that are open in one application."""

    def __init__(self, ingress: IngressConfig) -> None:
        self._ingress = ingress
        self._open: set[_Socket | LiveSocket] = set()
        self._num_of_tenant: Counter[str] = Counter()
        self._is_leaving = False

    def __len__(self) -> int:
        return len(self._open)

    def leave(self) -> None:
        """Close all, each once the answer under way has ended, and let no new one in."""
        self._is_leaving = True
        for socket in self._open:
            socket.leave()

    def check_room(self, tenant: str) -> None:
        """Refuse one more of a tenant where there is no room; OverloadedError."""
        if self._is_leaving:
            raise ServerOverloadedError("this server is about to end; connect again")
        if self._num_of_tenant[tenant] >= self._ingress.max_tenant_sockets:
            raise OverloadedError(f"{self._num_of_tenant[tenant]} websockets of yours are open, which is the most")
        if len(self._open) >= self._ingress.max_sockets:
            raise ServerOverloadedError(f"{len(self._open)} websockets are open here, which is the most")

    @contextlib.contextmanager
    def counting(self, tenant: str, socket: _Socket | LiveSocket) -> Iterator[None]:
        """Count a tenant's socket for as long as the block runs."""
        self._open.add(socket)
        self._num_of_tenant[tenant] += 1
        try:
            yield
        finally:
            self._open.discard(socket)
            self._num_of_tenant[tenant] -= 1
            if not self._num_of_tenant[tenant]:
                del self._num_of_tenant[tenant]


class SocketEndpoint:
    """Lets clients open websockets on a path whose route answers in server-sent events, or has sessions."""

    def __init__(
        self,
        held: HeldBytes,
        opened: OpenSockets,
        limits: RequestLimits,
        ingress: IngressConfig,
        make: MakeSession | None = None,
    ) -> None:
        """`make`: makes the sessions, where websockets are such."""
        self._held = held
        self._opened = opened
        self._limits = limits
        self._ingress = ingress
        self._make = make

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection. Its messages take the whole way of requests: a key may be withdrawn meanwhile."""
        try:
            check_origin(HTTPConnection(scope), self._ingress.cors_origins)
            self._opened.check_room(scope["state"]["tenant"])
        except MantaError as error:
            await error_response(error, scope)(scope, receive, send)
            return
        socket: _Socket | LiveSocket
        if self._make is not None:
            own = self._held, self._limits, self._ingress
            socket = LiveSocket(scope["app"], scope, receive, send, self._make, *own)
        else:
            state = SocketState(self._held, self._limits.max_body_bytes)
            socket = _Socket(scope["app"], scope, receive, send, state, self._ingress)
        with self._opened.counting(scope["state"]["tenant"], socket):
            await socket.serve()


class _Socket:
    """One connection that may be opened."""

    def __init__(
        self, app: ASGIApp, scope: Scope, receive: Receive, send: Send, state: SocketState, ingress: IngressConfig
    ) -> None:
        self._app = app
        self._scope = scope
        self._receive = receive
        self._send = send
        self._state = state
        self._ingress = ingress
        self._tenant: str = scope["state"]["tenant"]
        self._waiting: deque[_Waiting] = deque()
        self._wake = asyncio.Event()
        self._is_leaving = False
        self._num_messages = 0

    def leave(self) -> None:
        """End with the answer that is under way."""
        self._is_leaving = True
        self._wake.set()

    async def serve(self) -> None:
        """Answer messages until one side closes."""
        if (await self._receive())["type"] != "websocket.connect":
            return
        await self._send({"type": "websocket.accept"})
        reader, answers = asyncio.create_task(self._read()), asyncio.create_task(self._answer_all())
        try:
            await asyncio.wait((reader, answers), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (reader, answers):
                task.cancel()
            await asyncio.gather(reader, answers, return_exceptions=True)
            while self._waiting:
                self._waiting.popleft().release()
            if self._state.memory is not None:
                self._state.memory.clear()
        ended = reader if not reader.cancelled() else answers
        code, reason = (BROKEN, "internal error") if ended.exception() is not None else ended.result()
        if ended.exception() is not None:
            logger.error("a websocket broke", exc_info=ended.exception())
        if code is not None:
            with contextlib.suppress(OSError):  # it has just gone by itself
                await self._send({"type": "websocket.close", "code": code, "reason": reason})

    async def _read(self) -> tuple[int | None, str]:
        """Take messages in; ends with the code and reason of a close, None where the client has closed."""
        while (message := await self._receive())["type"] != "websocket.disconnect":
            if message["type"] == LEAVE:
                self.leave()
                continue
            text, raw = message.get("text"), message.get("bytes")
            payload = raw if text is None else text.encode()
            if len(self._waiting) >= MAX_WAITING:
                return POLICY, f"more than {MAX_WAITING} messages wait"
            self._waiting.append(_Waiting.of(payload or b"", Holding(self._state.held, self._tenant)))
            self._wake.set()
        return None, ""

    async def _answer_all(self) -> tuple[int, str]:
        """Answer messages in their order until the socket is idle for too long, too old, or has to leave."""
        now = asyncio.get_running_loop().time
        ends_at = now() + self._ingress.max_socket_s
        while True:
            idle_at = now() + self._ingress.socket_idle_s
            while not self._waiting and not self._is_leaving and now() < min(idle_at, ends_at):
                self._wake.clear()
                await _until(self._wake, min(idle_at, ends_at))
            if self._is_leaving:
                return RESTART, "the server is about to end"
            if now() >= ends_at:
                age = SocketAgeError(f"this websocket is {self._ingress.max_socket_s:g} s old: open another")
                await self._send_event(error_event(error_body(age), age.status, {}))
                return GOING_AWAY, "too old"
            if not self._waiting:
                return GOING_AWAY, f"idle for {self._ingress.socket_idle_s:g} s"
            await self._answer(self._waiting.popleft())

    async def _answer(self, waiting: _Waiting) -> None:
        waiting.release()  # from here on its body counts as that of a POST
        if waiting.refusal is not None:
            await self._send_event(error_event(error_body(waiting.refusal), waiting.refusal.status, {}))
            return
        self._num_messages += 1
        payload, scope = waiting.payload, self._post(len(waiting.payload))
        messages = iter(({"type": "http.request", "body": payload, "more_body": False},))

        async def receive() -> Message:
            message = next(messages, None)
            return message if message is not None else await asyncio.Future()  # if it leaves, the answer is cancelled

        await self._app(scope, receive, Events(scope, self._send_event))

    def _post(self, length: int) -> dict[str, Any]:
        """The scope of a message's own request."""
        path = self._scope["path"]
        return post_scope(self._scope, path, "application/json", length, self._num_messages, {_SOCKET: self._state})

    async def _send_event(self, text: str) -> None:
        try:
            await self._send({"type": "websocket.send", "text": text})
        except OSError:  # the client is gone: whoever reads hears of it, and has this task cancelled
            await asyncio.Future()


@dataclass(slots=True)
class _Waiting:
    """A message that waits for its turn, or why it will be refused."""

    payload: bytes
    holding: Holding | None
    refusal: OverloadedError | None = None

    def release(self) -> None:
        """No longer count it as what waits."""
        if self.holding is not None:
            self.holding.release()

    @classmethod
    def of(cls, payload: bytes, holding: Holding) -> _Waiting:
        """`payload`, counted; what finds no room is not kept."""
        try:
            holding.add(len(payload))
        except OverloadedError as error:
            holding.release()
            return cls(b"", None, error)
        return cls(payload, holding)


async def _until(event: asyncio.Event, at: float) -> None:
    """Wait for `event`, until `at` at most."""
    try:
        async with asyncio.timeout_at(at):
            await event.wait()
    except TimeoutError:
        return
