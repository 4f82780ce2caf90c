"""Engine side of the feeds: every Router replica is told how busy this replica is and what its prefix cache holds.

A feed is one long-lived response to one Router replica. Its first frame brings a snapshot of the cache; the next ones
bring numbered batches, each of them to all feeds alike, so every Router holds the same index. A Router that was silent
for `lease_s` loses its feed, so that nothing piles up for it. Lives on the event loop's thread, never on the engine's;
knows neither Ray nor Serve.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator

from app.deployments.channel.wire import FeedFrame, LoadReport, encode
from app.engine.kv_cache.kv_events import KVEventLog

LEASE_S = 10.0  # a Router asks `hello` every two seconds


class Feed:
    """The frames on their way to one Router replica."""

    def __init__(self, router_id: str) -> None:
        self.router_id = router_id
        self.last_heard_s = time.monotonic()
        self._frames: deque[bytes] = deque()
        self._wake = asyncio.Event()
        self._closed = False

    def push(self, frame: bytes) -> None:
        """Queue one frame."""
        self._frames.append(frame)
        self._wake.set()

    def close(self) -> None:
        """Let the stream end once the queued frames are out."""
        self._closed = True
        self._wake.set()

    async def frames(self) -> AsyncIterator[bytes]:
        """The frames in order, until the feed is closed."""
        while True:
            while self._frames:
                yield self._frames.popleft()
            if self._closed:
                return
            self._wake.clear()
            await self._wake.wait()


class FeedHub:
    """All feeds of one engine replica."""

    def __init__(self, log: KVEventLog, lease_s: float = LEASE_S) -> None:
        self._log = log
        self._lease_s = lease_s
        self._feeds: dict[str, Feed] = {}  # by router id

    @property
    def num_feeds(self) -> int:
        """Routers that listen."""
        return len(self._feeds)

    def open(self, router_id: str, load: LoadReport) -> Feed:
        """A new feed, whose first frame is the snapshot; it replaces any other of the same Router."""
        if (old := self._feeds.get(router_id)) is not None:
            old.close()
        feed = self._feeds[router_id] = Feed(router_id)
        feed.push(encode(FeedFrame(load, self._log.snapshot())))
        return feed

    def drop(self, feed: Feed) -> None:
        """Its Router has gone; idempotent."""
        if self._feeds.get(feed.router_id) is feed:
            del self._feeds[feed.router_id]
        feed.close()

    def renew(self, router_id: str) -> None:
        """A Router was heard of."""
        if (feed := self._feeds.get(router_id)) is not None:
            feed.last_heard_s = time.monotonic()

    def publish(self, load: LoadReport, *, force: bool) -> bool:
        """Tell every Router what has changed since the last time; without `force`, only if the cache has.

        Returns whether anything was sent.
        """
        batch = self._log.flush()
        if batch is None and not force:
            return False
        frame = encode(FeedFrame(load, batch))
        for feed in self._feeds.values():
            feed.push(frame)
        return True

    def expire(self) -> None:
        """Drop the feeds of Routers that were silent for too long."""
        deadline = time.monotonic() - self._lease_s
        for feed in [feed for feed in self._feeds.values() if feed.last_heard_s < deadline]:
            self.drop(feed)

    def close(self) -> None:
        """End all feeds: the replica is being replaced."""
        for feed in list(self._feeds.values()):
            self.drop(feed)
