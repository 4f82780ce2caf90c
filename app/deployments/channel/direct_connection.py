"""An ingress' end of the TCP connection to one engine replica: frames come, requests and questions go (I9).

It lives as long as the channel does: where it breaks, the replica is gone. Who speaks first, and with which proof,
say challenge.py and direct_messages.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from app.challenge import GREETING_BYTES, NONCE_BYTES, new_nonce, proof, proves
from app.deployments.channel.direct_messages import INGRESS, REPLICA, Kind
from app.deployments.channel.frame_queue import FrameQueue
from app.deployments.channel.message_stream import MAX_CONTENT_BYTES, MessageStream
from app.deployments.channel.wire import Opening, encode
from app.errors import EngineDeadError

CONNECT_TIMEOUT_S = 2.0  # then the handle is taken
FIRST_FRAME_TIMEOUT_S = 5.0  # a replica that has taken the connection is alive, maybe busy

Address = tuple[str, int]


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
