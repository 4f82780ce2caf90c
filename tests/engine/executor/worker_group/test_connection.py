"""Frames over socket pairs, without Ray."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from app.engine.executor.worker_group.connection import ConnectionLostError, FrameConnection
from tests import limits

Pair = tuple[FrameConnection, FrameConnection]


@pytest.fixture(params=["unix", "tcp"])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    if request.param == "unix":
        left, right = socket.socketpair()
    else:
        with socket.create_server(("127.0.0.1", 0)) as server:
            left = socket.create_connection(server.getsockname())
            right, _ = server.accept()
    ends = FrameConnection(left), FrameConnection(right)
    yield ends
    for end in ends:
        end.close()


def test_frames_keep_their_bounds_and_order(pair: Pair) -> None:
    frames = [b"", b"x", b"\x00" * 9, bytes(range(256)) * 300, b"end"]
    for frame in frames:
        pair[0].send(frame)
    assert [pair[1].recv(limits.patience_s()) for _ in frames] == frames
    assert pair[1].try_recv() is None


def test_both_ends_send_more_than_the_buffers_hold(pair: Pair) -> None:
    """Two blocking senders would wait for each other for ever."""
    payloads = [b"a" * 8_000_000, b"b" * 9_000_000]

    def exchange(end: int) -> bytes:
        pair[end].send(payloads[end], limits.patience_s())
        return pair[end].recv(limits.patience_s())

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(exchange, (0, 1))) == payloads[::-1]


def test_a_frame_in_parts_arrives_whole() -> None:
    raw, sock = socket.socketpair()
    end = FrameConnection(sock)
    wire = (5).to_bytes(8, "little") + b"hello" + (1).to_bytes(8, "little") + b"!"
    whole = []
    for byte in wire[:-1]:
        raw.sendall(bytes([byte]))
        whole.append(end.try_recv())
    assert [frame for frame in whole if frame is not None] == [b"hello"]
    raw.sendall(wire[-1:])
    assert end.recv(limits.patience_s()) == b"!"


def test_silence_times_out(pair: Pair) -> None:
    with limits.soon(20.0, "the timeout"), pytest.raises(TimeoutError):
        pair[0].recv(0.2)
    with pytest.raises(TimeoutError):  # nobody reads
        pair[0].send(b"x" * 50_000_000, 0.2)


def test_a_lost_peer_is_noticed_after_its_last_frame(pair: Pair) -> None:
    pair[0].send(b"last words")
    assert not pair[1].hung_up()
    pair[0].close()
    assert pair[1].hung_up(limits.patience_s())
    assert pair[1].recv(limits.patience_s()) == b"last words"
    with pytest.raises(ConnectionLostError):
        pair[1].recv(limits.patience_s())
    with pytest.raises(ConnectionLostError):
        pair[1].send(b"anyone?" * 10_000_000, limits.patience_s())
    pair[1].close()
    assert pair[1].hung_up()
    with pytest.raises(ConnectionLostError):
        pair[1].recv(limits.patience_s())


def test_waiting_costs_no_cpu(pair: Pair) -> None:
    before = time.thread_time()
    with pytest.raises(TimeoutError):
        pair[0].recv(0.5)
    assert time.thread_time() - before < 0.05
