"""Replicas of tests behind real sockets: a listener before one that is reached in memory, and the port to it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest

from app.config.ingress import IngressConfig
from app.deployments.channel import channel_listener, direct_connection
from app.deployments.channel.channel_client import ReplicaPort
from app.deployments.channel.channel_listener import ChannelListener
from app.deployments.channel.direct_connection import Address
from app.deployments.channel.direct_port import DirectPort
from app.errors import EngineDeadError, MantaError
from app.records.request import EngineRequest
from tests import limits

SECRET = b"the secret of these tests"
HOST = "127.0.0.1"


def be_patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loaded machine may take its time to connect."""
    monkeypatch.setattr(channel_listener, "GREETING_TIMEOUT_S", limits.patience_s())
    monkeypatch.setattr(direct_connection, "CONNECT_TIMEOUT_S", limits.patience_s())
    monkeypatch.setattr(direct_connection, "FIRST_FRAME_TIMEOUT_S", limits.patience_s())


class Replica:
    """What a listener asks, in front of one in this process."""

    def __init__(self, port: ReplicaPort, name: str) -> None:
        self._port = port
        self._name = name

    async def open_channel(self, channel_id: str, ingress_id: str, target: str) -> AsyncGenerator[bytes, None]:
        if target != self._name:
            raise EngineDeadError(f"engine replica {target} is gone")
        async with aclosing(self._port.open_channel(channel_id, ingress_id)) as frames:
            async for frame in frames:
                yield frame

    async def submit(
        self, channel_id: str, requests: list[tuple[str, EngineRequest]], target: str
    ) -> list[MantaError | None]:
        return await self._port.submit(channel_id, requests)

    async def seclude(self, channel_id: str, stream_id: str, target: str) -> bool:
        return await self._port.seclude(channel_id, stream_id)

    async def control(self, message: bytes, target: str) -> None:
        await self._port.control(message)


class NoHandle:
    """A Serve handle that nobody is to take."""

    async def open_channel(self, channel_id: str, ingress_id: str) -> AsyncGenerator[bytes, None]:
        raise AssertionError("the channel went over the handle")
        yield b""

    async def submit(self, channel_id: str, requests: list[tuple[str, EngineRequest]]) -> list[MantaError | None]:
        raise AssertionError("requests went over the handle")

    async def seclude(self, channel_id: str, stream_id: str) -> bool:
        raise AssertionError("a call went over the handle")

    async def control(self, message: bytes) -> None:
        raise AssertionError("a message went over the handle")


async def listen(port: ReplicaPort, name: str = "r1", secret: bytes = SECRET) -> tuple[ChannelListener, Address]:
    """A listener before a replica, and where it listens."""
    listener = ChannelListener(Replica(port, name), secret, IngressConfig())
    address = await listener.start(HOST)
    assert address is not None
    return listener, address


async def direct(port: ReplicaPort, name: str = "r1", handle: ReplicaPort | None = None) -> DirectPort:
    """The port to such a replica."""
    _, address = await listen(port, name)
    return DirectPort(address, SECRET, name, handle or NoHandle())


def cut(port: DirectPort) -> None:
    """Break its connection, as the end of a process or of a network would."""
    assert port._connection is not None
    transport = port._connection.stream._transport
    assert transport is not None
    transport.abort()


async def stranger(address: Address) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection of somebody who knows no secret."""
    return await asyncio.open_connection(*address)
