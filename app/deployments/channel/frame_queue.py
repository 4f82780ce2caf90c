"""The frames of one long-lived response on their way to one listener: an ingress or a Router."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncIterator


class FrameQueue:
    """Encoded frames in order, for a listener that gives signs of life."""

    def __init__(self, listener_id: str) -> None:
        self.listener_id = listener_id
        self.closed = False
        self._heard_s = time.monotonic()
        self._frames: deque[bytes] = deque()
        self._wake = asyncio.Event()
        self._ended = asyncio.Event()

    def renew(self) -> None:
        """Note a sign of life of the listener."""
        self._heard_s = time.monotonic()

    def is_silent(self, lease_s: float) -> bool:
        """True if the last sign of life is longer ago than that."""
        return self._heard_s < time.monotonic() - lease_s

    def push(self, frame: bytes) -> None:
        """Queue one frame."""
        self._frames.append(frame)
        self._wake.set()

    def close(self) -> None:
        """Let the stream end once the queued frames are out."""
        self.closed = True
        self._wake.set()

    async def wait_flushed(self, timeout_s: float) -> None:
        """Wait until a closed queue's last frame has been taken, or until the time is up."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._ended.wait(), timeout_s)

    async def frames(self) -> AsyncIterator[bytes]:
        """The frames in order, until the queue is closed."""
        while True:
            while self._frames:
                yield self._frames.popleft()
            if self.closed:
                self._ended.set()
                return
            self._wake.clear()
            await self._wake.wait()
