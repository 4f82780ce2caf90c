"""An answer while it is made: its writer adds bytes, and whoever follows reads them from the first one on."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from starlette.types import Message

from app.api.http.errors import ClientDisconnected
from app.api.http.held_bytes import SMALL_BYTES

MAX_KEPT_BYTES = 64 << 20  # of one answer; of a longer one only what its followers have not read
MAX_AHEAD_BYTES = 1 << 20  # of a longer one, that wait for the slowest of them


class NobodyFollowsError(ClientDisconnected):
    """A long answer is kept for nobody, and nobody reads it."""


@dataclass(slots=True, eq=False)
class _Follower:
    """Somebody who reads an answer."""

    place: int = 0  # number of the part that comes next


@dataclass(slots=True)
class RunningAnswer:
    """Status, headers and body of one answer."""

    status: int = 0  # 0: not known yet
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)
    has_room: Callable[[int], bool] = lambda _: True  # whether so many bytes more may be kept; they are counted then
    is_whole: bool = True  # whether its beginning is there still, so that another may follow
    error: Exception | None = None  # instead of an end
    has_ended: bool = False
    num_bytes: int = 0
    _parts: list[bytes] = field(default_factory=list)
    _first: int = 0  # number of the first part that is there still
    _followers: list[_Follower] = field(default_factory=list)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _over: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def is_over(self) -> bool:
        """True if nothing more comes."""
        return self._over.is_set()

    async def wait_over(self, seconds: float) -> None:
        """Wait until nothing more comes, at most so long."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._over.wait(), seconds)

    @property
    def num_parts(self) -> int:
        """Parts that have come."""
        return self._first + len(self._parts)

    def parts(self, start: int) -> list[bytes]:
        """The parts from number `start` on."""
        return self._parts[start - self._first :]

    async def add(self, message: Message) -> None:
        """Take what the application sends. NobodyFollowsError for a long answer that everybody has left."""
        if message["type"] == "http.response.start":
            self.status, self.headers = message["status"], list(message["headers"])
        elif body := message.get("body", b""):
            self._parts.append(body)
            self.num_bytes += len(body)
            has_room = self.num_bytes <= SMALL_BYTES or self.has_room(len(body))
            self.is_whole = self.is_whole and has_room and self.num_bytes <= MAX_KEPT_BYTES
        if message["type"] == "http.response.body" and not message.get("more_body", False):
            self.has_ended = True
            self._over.set()
        self.notify()
        while not self.is_whole and self._drop_what_was_read() > MAX_AHEAD_BYTES:
            await self.change()

    def fail(self, error: Exception) -> None:
        """It ends with an error."""
        self.error = error
        self._over.set()
        self.notify()

    async def change(self) -> None:
        """Wait until something has happened."""
        await self._changed.wait()

    def notify(self) -> None:
        """Something has happened."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def follow(self) -> AsyncIterator[Message]:
        """All messages of the answer, as they come. Raises what it ends with instead."""
        assert self.is_whole
        follower = _Follower()
        self._followers.append(follower)
        try:
            while not self.status:
                self._check()
                await self.change()
            yield {"type": "http.response.start", "status": self.status, "headers": list(self.headers)}
            while (parts := self._unread(follower)) or not self.has_ended:
                if parts:
                    yield {"type": "http.response.body", "body": b"".join(parts), "more_body": True}
                else:
                    self._check()
                    await self.change()
            yield {"type": "http.response.body", "body": b"", "more_body": False}
        finally:
            self._followers.remove(follower)
            self.notify()

    def _unread(self, follower: _Follower) -> list[bytes]:
        parts = self._parts[follower.place - self._first :]
        if parts:
            follower.place += len(parts)
            self.notify()
        return parts

    def _check(self) -> None:
        if self.error is not None:
            raise self.error

    def _drop_what_was_read(self) -> int:
        """Bytes that a reader has yet to read."""
        if not self._followers:
            raise NobodyFollowsError
        least = min(follower.place for follower in self._followers)
        del self._parts[: least - self._first]
        self._first = least
        return sum(map(len, self._parts))
