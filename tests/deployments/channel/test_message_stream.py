"""Messages over a real socket: order, one write a turn, bounds, and how a connection ends."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable
from functools import partial
from typing import Any

from app.deployments.channel import message_stream
from app.deployments.channel.message_stream import MessageStream
from tests import limits
from tests.limits import run, until


class End:
    """One end of a connection, which notes what comes."""

    def __init__(self, max_bytes: int = 1 << 20) -> None:
        self.got: list[tuple[int, int, bytes]] = []
        self.ended: list[str] = []
        self.stream = MessageStream(self._take, self.ended.append, max_bytes)

    def _take(self, kind: int, number: int, content: bytes) -> None:
        if content == b"bad":
            raise ValueError("it is bad")
        self.got.append((kind, number, content))


async def pair(**options: Any) -> tuple[End, End]:
    """Two ends, the second with these options."""
    ends = [End(), End(**options)]
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: ends[1].stream, "127.0.0.1", 0)
    await loop.create_connection(lambda: ends[0].stream, *server.sockets[0].getsockname())
    await until(lambda: ends[1].stream.is_open)
    server.close()
    return ends[0], ends[1]


def test_messages_come_whole_and_in_order() -> None:
    async def main() -> None:
        one, other = await pair(max_bytes=1 << 24)
        sent = [(7, number, bytes([number]) * size) for number, size in enumerate((0, 1, 5, 3_000_000, 2, 0))]
        for message in sent:
            one.stream.send(*message)
        await one.stream.drained(limits.patience_s())
        await until(lambda: len(other.got) == len(sent))
        assert other.got == sent
        other.stream.send(255, (1 << 32) - 1, b"back")
        await until(lambda: one.got)
        assert one.got == [(255, (1 << 32) - 1, b"back")]
        one.stream.abort("done")
        await until(lambda: other.ended)

    run(main())


def test_what_one_turn_sends_leaves_in_two_writes() -> None:
    async def main() -> None:
        one, other = await pair()
        transport = one.stream._transport
        assert transport is not None
        assert transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        writes: list[bytes] = []

        class Counted:
            def write(self, data: bytes) -> None:
                writes.append(data)

        one.stream._transport = Counted()  # type: ignore[assignment]
        for turn in range(2):
            for number in range(5):
                one.stream.send(1, number, b"x")
            assert len(writes) == 2 * turn + 1  # the first message does not wait
            await until(lambda turn=turn: len(writes) == 2 * turn + 2)
        one.stream._transport = transport
        transport.writelines(writes)
        await until(lambda: [number for _, number, _ in other.got] == [*range(5), *range(5)])
        one.stream.abort("done")

    run(main())


def test_a_message_that_is_too_long_ends_the_connection_unread() -> None:
    async def main() -> None:
        one, other = await pair(max_bytes=100)
        one.stream.send(1, 0, bytes(100))
        one.stream.send(1, 1, bytes(101))
        one.stream.send(1, 2, b"later")
        await until(lambda: one.ended and other.ended)
        assert [number for _, number, _ in other.got] == [0]
        assert other.ended == ["a message of 101 bytes, more than 100"]
        assert not one.stream.is_open
        one.stream.send(1, 3, b"into the void")

    run(main())


def test_so_does_one_that_is_refused() -> None:
    async def main() -> None:
        one, other = await pair()
        for content in (b"good", b"bad", b"good"):
            one.stream.send(1, 0, content)
        await until(lambda: other.ended)
        assert len(other.got) == 1
        assert other.ended == ["it is bad"]

    run(main())


def test_what_was_sent_before_the_end_arrives(monkeypatch: Any) -> None:
    monkeypatch.setattr(message_stream, "_LOOK_S", limits.patience_s())

    async def main() -> None:
        one, other = await pair(max_bytes=1 << 24)
        other.stream.send(1, 0, b"on its way to one who reads no more")
        for number in range(20):
            one.stream.send(1, number, bytes(500_000))
        one.stream.end()
        one.stream.send(1, 99, b"too late")
        await until(lambda: other.ended and one.ended)
        assert [number for _, number, _ in other.got] == list(range(20))

    run(main())


def test_an_end_that_nobody_answers_comes_all_the_same(monkeypatch: Any) -> None:
    monkeypatch.setattr(message_stream, "_LOOK_S", 0.01)

    async def main() -> None:
        end = End()
        server = await asyncio.get_running_loop().create_server(lambda: end.stream, "127.0.0.1", 0)
        with socket.create_connection(server.sockets[0].getsockname()) as silent:
            await until(lambda: end.stream.is_open)
            end.stream.end()
            await until(lambda: end.ended)
            assert silent.fileno() >= 0
        server.close()

    run(main())


class Queue:
    """A transport whose buffer holds so much."""

    queued = 9
    is_dropped = False

    def set_write_buffer_limits(self, high: int) -> None: ...

    def can_write_eof(self) -> bool:
        return False

    def get_write_buffer_size(self) -> int:
        return self.queued

    def abort(self) -> None:
        self.is_dropped = True


def test_who_takes_something_is_not_left() -> None:
    class Slow(Queue):
        def get_write_buffer_size(self) -> int:
            assert not self.is_dropped
            self.queued = max(0, self.queued - 1)
            return self.queued

    async def main() -> None:
        end, transport = End(), Slow()
        end.stream.connection_made(transport)  # type: ignore[arg-type]
        end.stream.pause_writing()
        await end.stream.drained(0.0)
        assert transport.is_dropped
        assert transport.queued == 0

    run(main())


def test_an_end_waits_as_long_as_the_other_end_takes_something() -> None:
    looks: list[Callable[[], None]] = []

    class Loop:
        def call_later(self, delay: float, look: Callable[..., None], *about: Any) -> None:
            looks.append(partial(look, *about))

    async def main() -> None:
        end, transport = End(), Queue()
        end.stream._loop = Loop()  # type: ignore[assignment]
        end.stream.connection_made(transport)  # type: ignore[arg-type]
        end.stream.end()
        for transport.queued in range(8, 0, -1):
            for _ in range(message_stream._FAREWELL_LOOKS):  # at the first something had left
                looks.pop()()
                assert not transport.is_dropped
        looks.pop()()
        assert transport.is_dropped
        assert not looks

    run(main())


def test_who_takes_nothing_holds_the_sender_up_and_is_left() -> None:
    async def main() -> None:
        end = End()
        server = await asyncio.get_running_loop().create_server(lambda: end.stream, "127.0.0.1", 0)
        with socket.create_connection(server.sockets[0].getsockname()):
            await until(lambda: end.stream.is_open)
            while end.stream._flow is None:
                end.stream.send(1, 0, bytes(1 << 20))
                await asyncio.sleep(0)
            await end.stream.drained(limits.AT_ONCE_S)
            await until(lambda: end.ended)
            assert end.ended == [f"it took nothing for {limits.AT_ONCE_S} s"]
            await end.stream.drained(limits.patience_s())
        server.close()

    run(main())


def test_a_head_may_come_in_pieces() -> None:
    async def main() -> None:
        end = End()
        server = await asyncio.get_running_loop().create_server(lambda: end.stream, "127.0.0.1", 0)
        _, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        for byte in struct.pack("<IBI", 3, 4, 5) + b"abc":
            writer.write(bytes([byte]))
            await writer.drain()
            await asyncio.sleep(0)
        await until(lambda: end.got)
        assert end.got == [(4, 5, b"abc")]
        writer.close()
        server.close()

    run(main())
