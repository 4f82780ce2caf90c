"""The engine replica's listener for the connections of ingresses, each of which carries one channel.

Whoever connects shows first that it knows the cluster's secret, within seconds and in a few bytes; what is read then is
msgpack of bounded length, never an object. What a connection brings is the replica's own calls, as Serve's handle would
bring them. Where it breaks, its channel ends and what runs there is aborted.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Coroutine
from contextlib import aclosing
from typing import Any, Protocol, cast

import msgspec

from app.challenge import GREETING_BYTES, NONCE_BYTES, new_nonce, proof, proves
from app.config.ingress import IngressConfig
from app.deployments.channel.direct_messages import INGRESS, REPLICA, Kind
from app.deployments.channel.message_stream import MessageStream
from app.deployments.channel.sent_requests import MAX_REQUESTS_BYTES, decode_requests, encode_refusals
from app.deployments.channel.wire import Opening, decode_opening
from app.errors import EngineDeadError, MantaError
from app.records.request import EngineRequest

MAX_STRANGERS = 64  # connections that have not shown the secret and opened a channel yet
GREETING_TIMEOUT_S = 5.0
STUCK_S = 10.0  # an ingress that takes no frame for so long is left; its lease has run out by then

logger = logging.getLogger("manta.channel")


def _may_connect(config: IngressConfig) -> bool:
    """True if channels may have connections of their own: where Ray encrypts what it sends, Serve's handles do, too."""
    return config.channel == "direct" and os.environ.get("RAY_USE_TLS", "0").lower() not in ("1", "true")


class Replica(Protocol):
    """Takes what comes over a connection: an EngineReplica. `target` is the replica that is meant."""

    def open_channel(self, channel_id: str, ingress_id: str, target: str) -> AsyncIterator[bytes]:
        """The frames of a channel, until it is closed."""

    async def submit(
        self, channel_id: str, requests: list[tuple[str, EngineRequest]], target: str
    ) -> list[MantaError | None]:
        """Take requests by stream id; returns why not, for each."""

    async def seclude(self, channel_id: str, stream_id: str, target: str) -> bool:
        """Keep the replica for one stream."""

    async def control(self, message: bytes, target: str) -> None:
        """Take a ControlMessage."""


class ChannelListener:
    """One replica's."""

    def __init__(self, replica: Replica, secret: bytes, config: IngressConfig) -> None:
        self._is_wanted = _may_connect(config)
        self.replica = replica
        self.secret = secret
        self.strangers: set[MessageStream] = set()
        self.sending: set[asyncio.Task[None]] = set()  # one for each channel
        self._server: asyncio.Server | None = None
        self._num_refused = 0

    async def start(self, host: str) -> tuple[str, int] | None:
        """Listen on a port of this address; returns both, or None where that cannot be, or is not wanted."""
        if not self._is_wanted:
            return None
        try:
            self._server = await asyncio.get_running_loop().create_server(lambda: _Guest(self).stream, host, 0)
        except OSError as error:
            logger.warning("no connections are taken at %s, so channels go over Serve's handles: %s", host, error)
            return None
        port: int = self._server.sockets[0].getsockname()[1]
        return host, port

    def note_refused(self, why: str) -> None:
        """A connection ended before it had opened a channel. They may be many: the 1st is told, the 2nd, the 4th
        and so on."""
        self._num_refused += 1
        if self._num_refused & (self._num_refused - 1) == 0:
            logger.warning("connections that were refused so far: %d; the last: %s", self._num_refused, why)

    async def drain(self) -> None:
        """Take no further connections, and wait until every channel has ended: Serve does not see those."""
        if self._server is not None:
            self._server.close()
        while self.sending:
            await asyncio.wait(self.sending)


class _Guest:
    """The replica's end of one connection."""

    def __init__(self, listener: ChannelListener) -> None:
        self._listener = listener
        self._hello = b""
        self._nonce = new_nonce()
        self._opening: Opening | None = None
        self._sending: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._has_told_unreadable = False
        self.stream = MessageStream(self._greet, self._end, GREETING_BYTES)
        loop = asyncio.get_running_loop()
        if len(listener.strangers) >= MAX_STRANGERS:
            loop.call_soon(self.stream.abort, "too many have not shown the secret")
            return
        listener.strangers.add(self.stream)
        self._limit = loop.call_later(GREETING_TIMEOUT_S, self._expire)

    def _expire(self) -> None:
        if self.stream in self._listener.strangers:
            self.stream.abort("it did not show the secret and open a channel in time")

    def _greet(self, kind: int, number: int, content: bytes) -> None:
        """HELLO, then PROOF; nothing else is taken."""
        secret = self._listener.secret
        if kind == Kind.HELLO and not self._hello and len(content) == NONCE_BYTES:
            self._hello = content
            self.stream.send(Kind.PROOF, 0, self._nonce + proof(secret, REPLICA, content, self._nonce))
        elif kind == Kind.PROOF and self._hello and proves(content, secret, INGRESS, self._hello, self._nonce):
            self.stream.on_message, self.stream.max_bytes = self._take, MAX_REQUESTS_BYTES
        else:
            raise ValueError("it does not know the cluster's secret")

    def _take(self, kind: int, number: int, content: bytes) -> None:
        if kind == Kind.OPEN and self._opening is None:
            self._opening = decode_opening(content)
            self._listener.strangers.discard(self.stream)
            self._limit.cancel()
            self._sending = asyncio.create_task(self._send_frames(self._opening))
            self._listener.sending.add(self._sending)
            self._sending.add_done_callback(self._listener.sending.discard)
        elif self._opening is None:
            raise ValueError("a message before the channel was opened")
        elif kind == Kind.SUBMIT:
            self._run(self._submit(number, self._opening, content))
        elif kind == Kind.SECLUDE:
            self._run(self._answer(number, self._seclude(self._opening, content)))
        elif kind == Kind.CONTROL:
            self._run(self._control(self._opening, content))
        else:
            raise ValueError(f"a message of an unknown kind ({kind})")

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, number: int, work: Coroutine[Any, Any, bytes]) -> None:
        try:
            self.stream.send(Kind.ANSWER, number, await work)
        except EngineDeadError as error:
            self.stream.send(Kind.FAILED, number, error.message.encode())
        except Exception as error:  # a bug of ours ends the call, not the connection
            logger.exception("a call of an ingress failed")
            self.stream.send(Kind.FAILED, number, f"{type(error).__name__}: {error}".encode())

    async def _submit(self, number: int, opening: Opening, content: bytes) -> None:
        try:
            requests = decode_requests(content)
        except ValueError as error:
            logger.log(logging.DEBUG if self._has_told_unreadable else logging.WARNING, "an ingress sends %s", error)
            self._has_told_unreadable = True
            self.stream.send(Kind.UNREADABLE, number, b"")
        else:
            await self._answer(number, self._refusals(opening, requests))

    async def _refusals(self, opening: Opening, requests: list[tuple[str, EngineRequest]]) -> bytes:
        return encode_refusals(await self._listener.replica.submit(opening.channel_id, requests, opening.replica_id))

    async def _control(self, opening: Opening, content: bytes) -> None:
        try:
            await self._listener.replica.control(content, opening.replica_id)
        except Exception as error:
            self.stream.abort(f"a control message failed: {error}")

    async def _seclude(self, opening: Opening, content: bytes) -> bytes:
        stream_id = content.decode()
        granted = await self._listener.replica.seclude(opening.channel_id, stream_id, opening.replica_id)
        return msgspec.msgpack.encode(granted)

    async def _send_frames(self, opening: Opening) -> None:
        frames = self._listener.replica.open_channel(opening.channel_id, opening.ingress_id, opening.replica_id)
        try:
            async with aclosing(cast(Any, frames)):
                async for frame in frames:
                    self.stream.send(Kind.FRAME, 0, frame)
                    await self.stream.drained(STUCK_S)
        except EngineDeadError as error:  # another replica is meant
            logger.info("a channel was not opened: %s", error)
        except Exception:
            logger.exception("the frames of ingress %s broke off", opening.ingress_id)
        finally:
            self.stream.end()

    def _end(self, why: str) -> None:
        if self.stream in self._listener.strangers:
            self._listener.strangers.discard(self.stream)
            self._limit.cancel()
            self._listener.note_refused(why)
        if self._sending is not None:
            self._sending.cancel()
