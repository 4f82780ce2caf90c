"""Reaches one engine replica over a TCP connection of its own; over the Serve handle where none can be had.

A call over a handle costs milliseconds on a busy machine, a frame down a Ray stream an object of Ray's. Here requests
and frames are messages of one connection (direct_messages.py). It lives as long as the channel does: where it breaks,
the replica is gone. What has no form as a message (sent_requests.py) still goes over the handle.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from weakref import WeakSet

import msgspec

from app.challenge import GREETING_BYTES, NONCE_BYTES, new_nonce, proof, proves
from app.deployments.channel.channel_client import ReplicaPort
from app.deployments.channel.direct_messages import INGRESS, REPLICA, Kind
from app.deployments.channel.frame_queue import FrameQueue
from app.deployments.channel.message_stream import MAX_CONTENT_BYTES, MessageStream
from app.deployments.channel.replica_finder import Discovery
from app.deployments.channel.sent_requests import decode_refusals, encode_requests
from app.deployments.channel.serve_port import SUBMIT_TIMEOUT_S, EngineHandles
from app.deployments.channel.wire import Opening, encode
from app.errors import EngineDeadError, MantaError
from app.records.request import EngineRequest

CONNECT_TIMEOUT_S = 2.0  # then the handle is taken
FIRST_FRAME_TIMEOUT_S = 5.0  # a replica that has taken the connection is alive, maybe busy

Address = tuple[str, int]

logger = logging.getLogger("manta.channel")


class UnreadableError(Exception):
    """The replica cannot read requests as this ingress writes them."""


class DirectConnection:
    """The ingress' end of one connection: a channel's frames, and answers to questions."""

    def __init__(self, secret: bytes, opening: Opening) -> None:
        self._secret = secret
        self._opening = opening
        self._hello = new_nonce()
        self._answers: dict[int, asyncio.Future[bytes]] = {}
        self._number = 0
        self._frames = FrameQueue(opening.replica_id)
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._why = "it ended the channel"
        self.stream = MessageStream(self._greet, self._end, GREETING_BYTES)

    async def connect(self, address: Address) -> None:
        """Connect; OSError or TimeoutError where the replica is not reached, or is not what answers there."""
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            await loop.create_connection(lambda: self.stream, *address)
        self.stream.send(Kind.HELLO, 0, self._hello)
        try:
            async with asyncio.timeout(FIRST_FRAME_TIMEOUT_S):
                await self._ready
        except BaseException:
            self.close()
            raise

    async def ask(self, kind: Kind, content: bytes, timeout_s: float) -> bytes:
        """The replica's answer. TimeoutError where none comes in time, EngineDeadError where none will."""
        self._number = number = (self._number + 1) & 0xFFFFFFFF
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._answers[number] = answer
        try:
            async with asyncio.timeout(timeout_s):
                self.tell(kind, content, number)
                return await answer
        except TimeoutError:
            raise TimeoutError(f"no answer within {timeout_s:g} s") from None
        finally:
            del self._answers[number]

    def tell(self, kind: Kind, content: bytes, number: int = 0) -> None:
        """Send what is not answered, or is by that number; EngineDeadError where the connection has ended.

        Nothing waits for the socket here: what is long waits for its answer, and whether the replica lives is seen by
        its heartbeats, not by how soon it takes what is queued.
        """
        if not self.stream.is_open:
            raise EngineDeadError(self._why)
        self.stream.send(kind, number, content)

    async def frames(self) -> AsyncGenerator[bytes, None]:
        """The channel's frames, to its end."""
        async for frame in self._frames.frames():
            yield frame
        raise EngineDeadError(self._why)

    def close(self) -> None:
        """End the connection, and with it the channel."""
        self.stream.abort("the ingress closed the channel")

    def _greet(self, kind: int, number: int, content: bytes) -> None:
        nonce, shown = content[:NONCE_BYTES], content[NONCE_BYTES:]
        if kind != Kind.PROOF or not proves(shown, self._secret, REPLICA, self._hello, nonce):
            raise ValueError("what answers there does not know the cluster's secret")
        self.stream.on_message, self.stream.max_bytes = self._take, MAX_CONTENT_BYTES
        self.stream.send(Kind.PROOF, 0, proof(self._secret, INGRESS, self._hello, nonce))
        self.stream.send(Kind.OPEN, 0, encode(self._opening))

    def _take(self, kind: int, number: int, content: bytes) -> None:
        if kind == Kind.FRAME:
            self._frames.push(content)
            if not self._ready.done():
                self._ready.set_result(None)
            return
        answer = self._answers.get(number)
        if answer is None or answer.done():
            return  # who asked waits no longer
        if kind == Kind.ANSWER:
            answer.set_result(content)
        elif kind == Kind.UNREADABLE:
            answer.set_exception(UnreadableError())
        else:
            answer.set_exception(EngineDeadError(content.decode(errors="replace")))

    def _end(self, why: str) -> None:
        self._why = why
        self._frames.close()
        if not self._ready.done():
            self._ready.set_exception(ConnectionError(why))
            self._ready.exception()  # nobody may wait for it any more
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(EngineDeadError(why))


class DirectPort:
    """See ReplicaPort; one a channel."""

    def __init__(self, address: Address, secret: bytes, replica_id: str, handle: ReplicaPort) -> None:
        """`handle` is taken where there is no connection, and for what cannot go over it."""
        self._address = address
        self._secret = secret
        self._replica_id = replica_id
        self._handle = handle
        self._connection: DirectConnection | None = None

    @property
    def is_connected(self) -> bool:
        """True if requests go over a connection."""
        return self._connection is not None and self._connection.stream.is_open

    async def open_channel(self, channel_id: str, ingress_id: str) -> AsyncGenerator[bytes, None]:
        """See ReplicaPort."""
        connection = await self._connect(Opening(channel_id, ingress_id, self._replica_id))
        if connection is None:
            async with aclosing(self._handle.open_channel(channel_id, ingress_id)) as frames:
                async for frame in frames:
                    yield frame
            return
        self._connection = connection
        try:
            async for frame in connection.frames():
                yield frame
        finally:
            connection.close()

    async def submit(self, channel_id: str, requests: list[tuple[str, EngineRequest]]) -> list[MantaError | None]:
        """See SubmitPort."""
        if self._connection is not None and (content := encode_requests(requests)) is not None:
            try:
                return decode_refusals(await self._connection.ask(Kind.SUBMIT, content, SUBMIT_TIMEOUT_S))
            except UnreadableError:
                logger.warning(
                    "engine replica %s cannot read requests of this ingress; Serve's handle can", self._replica_id
                )
        return await self._handle.submit(channel_id, requests)

    async def seclude(self, channel_id: str, stream_id: str) -> bool:
        """See ReplicaPort."""
        if self._connection is None:
            return await self._handle.seclude(channel_id, stream_id)
        answer = await self._connection.ask(Kind.SECLUDE, stream_id.encode(), SUBMIT_TIMEOUT_S)
        return msgspec.msgpack.decode(answer, type=bool)

    async def control(self, message: bytes) -> None:
        """See ReplicaPort. What the connection has taken arrives, unless it breaks, and with it the channel."""
        if self._connection is None:
            await self._handle.control(message)
        else:
            self._connection.tell(Kind.CONTROL, message)

    async def _connect(self, opening: Opening) -> DirectConnection | None:
        connection, began = DirectConnection(self._secret, opening), time.monotonic()
        where = f"{self._replica_id} at {self._address[0]}:{self._address[1]}"
        try:
            await connection.connect(self._address)
        except (OSError, TimeoutError) as error:
            logger.warning(
                "no connection to engine replica %s, Serve's handle is taken: %s", where, error or "no answer"
            )
            return None
        logger.info("connected to engine replica %s in %.1f ms", where, 1000 * (time.monotonic() - began))
        return connection


class DirectPorts:
    """The ways to one model's replicas, which have told their addresses. Without a `secret` all are Serve's."""

    def __init__(self, handles: EngineHandles, secret: bytes | None) -> None:
        self._handles = handles
        self._secret = secret
        self._addresses: dict[str, Address] = {}
        self._ports: WeakSet[DirectPort] = WeakSet()

    @property
    def num_connected(self) -> int:
        """Replicas to which there is a connection."""
        return sum(port.is_connected for port in self._ports)

    def learn(self, discovery: Discovery) -> Discovery:
        """Note the addresses of the replicas that were found, and pass them on."""
        told = {report.replica_id: report.address for report in discovery.reports if report.address is not None}
        self._addresses = told if discovery.complete else self._addresses | told
        return discovery

    def port(self, replica_id: str) -> ReplicaPort:
        """The way to one replica."""
        handle, address = self._handles.port(replica_id), self._addresses.get(replica_id)
        if self._secret is None or address is None:
            return handle
        port = DirectPort(address, self._secret, replica_id, handle)
        self._ports.add(port)
        return port
