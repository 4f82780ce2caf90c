"""A replica's listener sends away who does not know the secret, whatever he sends and however many he is."""

from __future__ import annotations

import asyncio
import logging
import struct
from collections.abc import AsyncIterator
from typing import Any

import pytest

from app.challenge import GREETING_BYTES, NONCE_BYTES, new_nonce, proof, proves
from app.config.ingress import IngressConfig
from app.deployments.channel import channel_listener
from app.deployments.channel.channel_listener import ChannelListener
from app.deployments.channel.direct_messages import INGRESS, REPLICA, Kind, channel_secret
from app.deployments.channel.sent_requests import MAX_REQUESTS_BYTES
from app.deployments.channel.wire import Opening, encode
from tests import limits
from tests.deployments.over_tcp import HOST, SECRET, be_patient, stranger
from tests.limits import run, until


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    be_patient(monkeypatch)


class Replica:
    """Notes what reaches it."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.ended = asyncio.Event()

    async def open_channel(self, channel_id: str, ingress_id: str, target: str) -> AsyncIterator[bytes]:
        self.asked.append(f"open {channel_id} {ingress_id} {target}")
        try:
            yield b"first"
            await asyncio.Event().wait()
        finally:
            self.ended.set()

    async def submit(self, channel_id: str, requests: list[Any], target: str) -> list[None]:
        self.asked.append("submit")
        return [None] * len(requests)

    async def seclude(self, channel_id: str, stream_id: str, target: str) -> bool:
        self.asked.append(f"seclude {stream_id}")
        return True

    async def control(self, message: bytes, target: str) -> None:
        self.asked.append("control")
        if message == b"bad":
            raise ValueError("no control message")


def message(kind: int, content: bytes, number: int = 0) -> bytes:
    return struct.pack("<IBI", len(content), kind, number) + content


class Peer:
    """A connection by hand."""

    async def connect(self, address: tuple[str, int]) -> Peer:
        self._reader, self._writer = await stranger(address)
        return self

    def send(self, *data: bytes) -> None:
        self._writer.write(b"".join(data))

    async def receive(self) -> tuple[int, int, bytes]:
        length, kind, number = struct.unpack("<IBI", await self._reader.readexactly(9))
        return kind, number, await self._reader.readexactly(length)

    async def is_sent_away(self) -> bool:
        """True once the other end closes, having said no more than what a greeting takes."""
        try:
            return len(await asyncio.wait_for(self._reader.read(), limits.patience_s())) <= GREETING_BYTES + 9
        except ConnectionError:
            return True

    async def greet(self, secret: bytes = SECRET) -> None:
        """Show the secret."""
        hello = new_nonce()
        self.send(message(Kind.HELLO, hello))
        kind, _, content = await self.receive()
        nonce, shown = content[:NONCE_BYTES], content[NONCE_BYTES:]
        assert kind == Kind.PROOF
        assert proves(shown, SECRET, REPLICA, hello, nonce)
        self.send(message(Kind.PROOF, proof(secret, INGRESS, hello, nonce)))

    def close(self) -> None:
        self._writer.close()


async def listening() -> tuple[Replica, ChannelListener, tuple[str, int]]:
    replica = Replica()
    listener = ChannelListener(replica, SECRET, IngressConfig())
    address = await listener.start(HOST)
    assert address is not None
    return replica, listener, address


OPEN = message(Kind.OPEN, encode(Opening("c", "i", "r")))


def test_who_knows_the_secret_is_served() -> None:
    async def main() -> None:
        replica, listener, address = await listening()
        peer = await Peer().connect(address)
        await peer.greet()
        peer.send(OPEN, message(Kind.SECLUDE, b"7", 3), message(Kind.CONTROL, b""))
        assert {await peer.receive(), await peer.receive()} == {(Kind.FRAME, 0, b"first"), (Kind.ANSWER, 3, b"\xc3")}
        await until(lambda: replica.asked == ["open c i r", "seclude 7", "control"])
        assert not listener.strangers
        peer.close()
        await replica.ended.wait()
        await listener.drain()

    run(main())


@pytest.mark.parametrize(
    "sent",
    [
        message(Kind.OPEN, b"x"),
        OPEN,
        message(Kind.PROOF, bytes(32)),
        message(Kind.HELLO, b"short"),
        message(Kind.HELLO, bytes(32)) + message(Kind.HELLO, bytes(32)),
        message(Kind.HELLO, bytes(32)) + OPEN,
        message(Kind.HELLO, bytes(32)) + message(Kind.PROOF, bytes(32)) + OPEN,
        message(Kind.HELLO, bytes(65)),
        struct.pack("<IBI", (1 << 32) - 1, Kind.HELLO, 0),
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\x80\x04\x95" + bytes(100),
    ],
    ids=range(11),
)
def test_who_does_not_is_sent_away(sent: bytes) -> None:
    async def main() -> None:
        replica, listener, address = await listening()
        peer = await Peer().connect(address)
        peer.send(sent)
        assert await peer.is_sent_away()
        await until(lambda: not listener.strangers)
        assert replica.asked == []
        peer.close()
        await listener.drain()

    run(main())


def test_another_secret_opens_nothing_nor_does_an_old_proof() -> None:
    async def main() -> None:
        replica, listener, address = await listening()
        peer = await Peer().connect(address)
        await peer.greet(secret=b"another one")
        peer.send(OPEN)
        assert await peer.is_sent_away()
        hello = new_nonce()
        heard = proof(SECRET, INGRESS, hello, new_nonce())  # of another connection, to another nonce
        again = await Peer().connect(address)
        again.send(message(Kind.HELLO, hello), message(Kind.PROOF, heard), OPEN)
        assert await again.is_sent_away()
        mirror = await Peer().connect(address)
        mirror.send(message(Kind.HELLO, hello))
        _, _, content = await mirror.receive()
        mirror.send(message(Kind.PROOF, content[NONCE_BYTES:]), OPEN)  # the replica's own proof
        assert await mirror.is_sent_away()
        assert replica.asked == []
        await listener.drain()

    run(main())


def test_strangers_are_bounded_in_number_and_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel_listener, "MAX_STRANGERS", 2)

    async def main() -> None:
        replica, listener, address = await listening()
        quiet = [await Peer().connect(address) for _ in range(2)]
        await until(lambda: len(listener.strangers) == 2)
        third = await Peer().connect(address)
        assert await third.is_sent_away()
        quiet[0].close()
        await until(lambda: len(listener.strangers) == 1)
        friend = await Peer().connect(address)
        await friend.greet()
        friend.send(OPEN)
        assert await friend.receive() == (Kind.FRAME, 0, b"first")
        monkeypatch.setattr(channel_listener, "GREETING_TIMEOUT_S", limits.AT_ONCE_S)
        late = await Peer().connect(address)
        assert await late.is_sent_away()
        assert replica.asked == ["open c i r"]
        for peer in (friend, *quiet):
            peer.close()
        await listener.drain()

    run(main())


def test_who_knows_the_secret_and_opens_nothing_is_sent_away() -> None:
    async def main() -> None:
        replica, listener, address = await listening()
        peer = await Peer().connect(address)
        await peer.greet()
        await until(lambda: [one.max_bytes for one in listener.strangers] == [MAX_REQUESTS_BYTES])
        (stream,) = listener.strangers
        stream.on_message.__self__._expire()  # type: ignore[attr-defined]
        assert await peer.is_sent_away()
        await until(lambda: not listener.strangers)
        assert replica.asked == []
        await listener.drain()

    run(main())


def test_the_log_tells_how_many_were_refused_and_is_not_flooded(caplog: pytest.LogCaptureFixture) -> None:
    listener = ChannelListener(Replica(), SECRET, IngressConfig())
    with caplog.at_level(logging.WARNING, "manta.channel"):
        for number in range(1, 1001):
            listener.note_refused(f"reason {number}")
    assert len(caplog.records) == 10
    assert caplog.messages[-1] == "connections that were refused so far: 512; the last: reason 512"


@pytest.mark.parametrize(
    "sent",
    [
        message(Kind.SUBMIT, b"\x94\x90\x90\x90\x90"),  # before the channel
        OPEN + OPEN,
        message(Kind.OPEN, b"no opening"),
        OPEN + message(99, b""),
        OPEN + message(Kind.FRAME, b""),
        OPEN + message(Kind.CONTROL, b"bad"),
        OPEN + struct.pack("<IBI", MAX_REQUESTS_BYTES + 1, Kind.SUBMIT, 1),
    ],
    ids=range(7),
)
def test_an_ingress_that_says_something_else_is_left(sent: bytes) -> None:
    async def main() -> None:
        replica, listener, address = await listening()
        peer = await Peer().connect(address)
        await peer.greet()
        peer.send(sent)
        assert await peer.is_sent_away()
        assert "submit" not in replica.asked
        peer.close()
        await listener.drain()
        assert replica.ended.is_set() == any(asked.startswith("open") for asked in replica.asked)

    run(main())


def test_requests_that_cannot_be_read_are_told_and_end_nothing(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        unread = [(Kind.UNREADABLE, 5, b""), (Kind.UNREADABLE, 7, b"")]
        replica, listener, address = await listening()
        peer = await Peer().connect(address)
        await peer.greet()
        peer.send(OPEN, message(Kind.SUBMIT, b"\x80\x04N.", 5), message(Kind.SUBMIT, b"\x94\x90\x90\x90\x90", 6))
        peer.send(message(Kind.SUBMIT, b"\x80", 7))
        got = [await peer.receive() for _ in range(4)]
        assert sorted(got) == [(Kind.FRAME, 0, b"first"), (Kind.ANSWER, 6, b"\x90"), *unread]
        assert replica.asked == ["open c i r", "submit"]
        assert len([told for told in caplog.messages if "cannot be read" in told]) == 1
        peer.close()
        await listener.drain()

    with caplog.at_level(logging.WARNING, "manta.channel"):
        run(main())


def test_where_nothing_can_listen_there_is_no_address() -> None:
    async def main() -> None:
        listener = ChannelListener(Replica(), SECRET, IngressConfig())
        assert await listener.start("192.0.2.1") is None  # an address of nobody (RFC 5737)
        await listener.drain()

    run(main())


def test_connections_are_for_networks_that_ray_does_not_encrypt(monkeypatch: pytest.MonkeyPatch) -> None:
    async def listens(config: IngressConfig) -> bool:
        listener = ChannelListener(Replica(), SECRET, config)
        address = await listener.start(HOST)
        await listener.drain()
        return address is not None

    monkeypatch.delenv("RAY_USE_TLS", raising=False)
    assert run(listens(IngressConfig()))
    assert not run(listens(IngressConfig(channel="serve")))
    monkeypatch.setenv("RAY_USE_TLS", "1")
    assert not run(listens(IngressConfig()))


def test_the_secret_follows_from_the_key_and_is_another() -> None:
    assert channel_secret(b"a") == channel_secret(b"a")
    assert channel_secret(b"a") != channel_secret(b"b")
    assert channel_secret(bytes(32)) != bytes(32)
