"""A stream socket that carries frames (8 bytes of length, then the payload) between the driver and one worker.

Both ends are full duplex: while a large frame leaves, arriving bytes are taken in, so two ends that send to each
other at once never wait for each other. Waiting is a sleep in `poll`: an idle end costs no CPU.
"""

from __future__ import annotations

import select
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager

_LENGTH = struct.Struct("<Q")
_CHUNK_BYTES = 1 << 16
# Wakes on a peer that is gone but not on data; where it is missing (macOS) POLLHUP does the same.
HANG_UP_EVENTS: int = getattr(select, "POLLRDHUP", select.POLLHUP)


class ConnectionLostError(ConnectionError):
    """The other end closed the socket or died."""


class FrameConnection:
    """One connected socket. One thread sends and receives; `hung_up` may be called from any."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._received = bytearray()
        self._most_bytes: int | None = None
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)

    def fileno(self) -> int:
        """The socket's file descriptor; -1 once closed."""
        return self._sock.fileno()

    @contextmanager
    def limited(self, num_bytes: int) -> Iterator[None]:
        """Meanwhile a longer frame counts as a lost connection: for a peer that has not shown who it is."""
        self._most_bytes = num_bytes
        try:
            yield
        finally:
            self._most_bytes = None

    def send(self, payload: bytes, timeout_s: float | None = None) -> None:
        """Send one frame. TimeoutError when the other end does not take it, ConnectionLostError when it is gone."""
        parts = [memoryview(_LENGTH.pack(len(payload))), memoryview(payload)]
        deadline = _deadline(timeout_s)
        while parts:
            try:
                sent = self._sock.sendmsg(parts)
            except BlockingIOError:
                if self._wait(select.POLLIN | select.POLLOUT, deadline) & select.POLLIN:
                    self._take_in()
                continue
            except OSError as error:
                raise ConnectionLostError(str(error)) from error
            while parts and sent >= len(parts[0]):
                sent -= len(parts.pop(0))
            if sent:
                parts[0] = parts[0][sent:]

    def recv(self, timeout_s: float | None = None) -> bytes:
        """Next frame. TimeoutError after `timeout_s`, ConnectionLostError when the other end is gone."""
        deadline = _deadline(timeout_s)
        while (frame := self.try_recv()) is None:
            self._wait(select.POLLIN, deadline)
        return frame

    def try_recv(self) -> bytes | None:
        """Next frame if it has arrived whole, else None. ConnectionLostError when the other end is gone."""
        while (frame := self._next_frame()) is None:
            if not self._take_in():
                return None
        return frame

    def hung_up(self, timeout_s: float = 0.0) -> bool:
        """True if the other end is gone, or goes within `timeout_s` (bytes it sent before may still be unread)."""
        poll = select.poll()
        try:
            poll.register(self._sock, HANG_UP_EVENTS)
            return bool(poll.poll(timeout_s * 1000))
        except (OSError, ValueError):  # closed here, perhaps by another thread just now
            return True

    def close(self) -> None:
        """Close the socket; idempotent."""
        self._sock.close()

    def _next_frame(self) -> bytes | None:
        have = len(self._received)
        if have < _LENGTH.size:
            return None
        length: int = _LENGTH.unpack_from(self._received)[0]
        if self._most_bytes is not None and length > self._most_bytes:
            raise ConnectionLostError("the other end sends something else than was expected")
        end = _LENGTH.size + length
        if have < end:
            return None
        with memoryview(self._received) as view:
            frame = bytes(view[_LENGTH.size : end])
        del self._received[:end]
        return frame

    def _take_in(self) -> bool:
        """Move what has arrived into the buffer; False when there was nothing."""
        try:
            chunk = self._sock.recv(_CHUNK_BYTES)
        except BlockingIOError:
            return False
        except OSError as error:
            raise ConnectionLostError(str(error)) from error
        if not chunk:
            raise ConnectionLostError("the other end closed the connection")
        self._received += chunk
        return True

    def _wait(self, events: int, deadline: float | None) -> int:
        remaining_ms = None if deadline is None else max(0.0, deadline - time.monotonic()) * 1000
        self._poll.modify(self._sock, events)
        ready = self._poll.poll(remaining_ms)
        if not ready:
            raise TimeoutError("no answer from the other end")
        return ready[0][1]


def _deadline(timeout_s: float | None) -> float | None:
    return None if timeout_s is None else time.monotonic() + timeout_s
