"""Reaches one engine replica over a TCP connection of its own; over the Serve handle where none can be had.

A call over a handle costs milliseconds on a busy machine, a frame down a Ray stream an object of Ray's. Here requests
and frames are messages of one connection (direct_connection.py). What has no form as a message (sent_requests.py) still
goes over the handle.
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from weakref import WeakSet

import msgspec

from app.deployments.channel.channel_client import ReplicaPort
from app.deployments.channel.direct_connection import Address, DirectConnection, UnreadableError
from app.deployments.channel.direct_messages import Kind
from app.deployments.channel.replica_finder import Discovery
from app.deployments.channel.sent_requests import decode_refusals, encode_requests
from app.deployments.channel.serve_port import SUBMIT_TIMEOUT_S, EngineHandles
from app.deployments.channel.wire import Opening
from app.errors import MantaError
from app.records.request import EngineRequest

logger = logging.getLogger("manta.channel")


class DirectPort:
    """See ReplicaPort; one a channel."""

    def __init__(self, address: Address, secret: bytes, replica_id: str, handle: ReplicaPort) -> None:
        """`handle` is taken where there is no connection, and for what cannot go over it."""
        self._address = address
        self._secret = secret
        self._replica_id = replica_id
        self._handle = handle
        self._connection: DirectConnection | None = None
        self._was_unread = False  # by a replica of another version, as it has been said

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
                self._note_unread()
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

    def _note_unread(self) -> None:
        if not self._was_unread:
            logger.warning(
                "engine replica %s cannot read requests of this ingress; Serve's handle can", self._replica_id
            )
        self._was_unread = True

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
