"""Carries numbered messages of a kind over one TCP connection, without ever holding the event loop up.

Each has a head of 9 bytes: the length of its content, its kind, and a number by which an answer names its question.
The first that is sent in a turn of the event loop leaves at once, and all others of the turn in one write at its end: a
turn may take long where another thread holds the interpreter. Python's event loops turn Nagle's algorithm off.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable
from typing import cast

import msgspec

_HEAD = struct.Struct("<IBI")
MAX_CONTENT_BYTES = (1 << 32) - 1  # that a head can name
_BUFFER_BYTES = 1 << 20  # on their way into the socket, beyond which who sends may wait for the other end
# Once the other end was told that nothing more comes, it is left when it has taken nothing at so many looks: not at
# one, as a turn of this loop may take longer than all of them should.
_FAREWELL_LOOKS = 8
_LOOK_S = 0.5

OnMessage = Callable[[int, int, bytes], None]
OnEnd = Callable[[str], None]


class MessageStream(asyncio.Protocol):
    """One end. `on_message` gets kind, number and content of each message, in order, and ends the connection by
    raising ValueError or msgspec's error; `on_end` hears once why nothing comes any more."""

    def __init__(self, on_message: OnMessage, on_end: OnEnd, max_bytes: int) -> None:
        self.on_message = on_message
        self.max_bytes = max_bytes  # of the content of a message that comes
        self._on_end = on_end
        self._transport: asyncio.Transport | None = None
        self._received = bytearray()
        self._unsent: list[bytes] = []
        self._num_written = 0  # bytes, into the transport
        self._loop = asyncio.get_running_loop()
        self._flow: asyncio.Future[None] | None = None  # while the socket's buffer is full
        self._why = "the other end closed the connection"
        self._is_ending = False
        self._is_gathering = False  # until the end of this turn

    @property
    def is_open(self) -> bool:
        """True if what is sent now may arrive."""
        return self._transport is not None and not self._is_ending

    def send(self, kind: int, number: int, content: bytes) -> None:
        """Send one message; nothing where the connection has ended."""
        if not self.is_open:
            return
        self._unsent += (_HEAD.pack(len(content), kind, number), content)
        if not self._is_gathering:
            self._flush()
            self._is_gathering = True
            self._loop.call_soon(self._end_turn)

    async def drained(self, timeout_s: float) -> None:
        """Wait while more than a buffer's fill is on its way; a connection that takes nothing for so long ends."""
        while self._flow is not None:
            num_taken = self._num_taken()
            try:
                await asyncio.wait_for(asyncio.shield(self._flow), timeout_s)
            except TimeoutError:
                if self._num_taken() == num_taken:
                    self.abort(f"it took nothing for {timeout_s:g} s")
                    return

    def end(self) -> None:
        """Send what is queued and say that nothing follows; the other end closes then."""
        self._flush()
        if self._transport is None or self._is_ending:
            return
        self._is_ending = True
        self._why = "this end closed the connection"
        if self._transport.can_write_eof() and not self._transport.is_closing():
            self._transport.write_eof()
        self._loop.call_later(_LOOK_S, self._look, self._num_taken(), 0)

    def abort(self, why: str) -> None:
        """Drop the connection now; what is on its way may be lost."""
        self._why = why
        self._is_ending = True
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio.Protocol."""
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(_BUFFER_BYTES)
        if self._is_ending:  # it was refused before it stood
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        received = self._received
        received += data
        begin = 0
        try:
            while not self._is_ending and len(received) - begin >= _HEAD.size:
                length, kind, number = _HEAD.unpack_from(received, begin)
                if length > self.max_bytes:
                    raise ValueError(f"a message of {length} bytes, more than {self.max_bytes}")
                first = begin + _HEAD.size
                if len(received) < first + length:
                    break
                begin = first + length
                self.on_message(kind, number, memoryview(received)[first:begin].tobytes())
        except (ValueError, msgspec.MsgspecError) as error:
            self.abort(str(error))
        del received[:begin]

    def eof_received(self) -> bool:
        """See asyncio.Protocol: the connection closes."""
        return False

    def connection_lost(self, error: Exception | None) -> None:
        """See asyncio.Protocol."""
        self._transport = None
        self._is_ending = True
        self._unsent.clear()
        self.resume_writing()
        self._on_end(self._why if error is None else f"{type(error).__name__}: {error}")

    def pause_writing(self) -> None:
        """See asyncio.Protocol."""
        self._flow = self._loop.create_future()

    def resume_writing(self) -> None:
        """See asyncio.Protocol."""
        flow, self._flow = self._flow, None
        if flow is not None and not flow.done():
            flow.set_result(None)

    def _look(self, num_taken: int, num_idle: int) -> None:
        """Leave the other end at the last of the looks at which it has taken nothing."""
        if self._transport is None:
            return
        taken_now = self._num_taken()
        num_idle = num_idle + 1 if taken_now == num_taken else 0
        if num_idle == _FAREWELL_LOOKS:
            self._transport.abort()
        else:
            self._loop.call_later(_LOOK_S, self._look, taken_now, num_idle)

    def _num_taken(self) -> int:
        """Bytes that the socket has taken, all in all."""
        return self._num_written - (0 if self._transport is None else self._transport.get_write_buffer_size())

    def _end_turn(self) -> None:
        self._is_gathering = False
        self._flush()

    def _flush(self) -> None:
        unsent, self._unsent = self._unsent, []
        if unsent and self._transport is not None:
            data = b"".join(unsent)
            self._num_written += len(data)
            self._transport.write(data)
