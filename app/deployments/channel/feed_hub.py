"""Engine side of the feeds: every Router replica is told how busy this replica is and what its prefix cache holds.

A feed is one long-lived response to one Router replica. Its first frame brings a snapshot of the cache; the next ones
bring numbered batches, each of them to all feeds alike, so every Router holds the same index. A Router that was silent
for `lease_s` loses its feed, so that nothing piles up for it. Lives on the event loop's thread, never on the engine's;
knows neither Ray nor Serve.
"""

from __future__ import annotations

from app.deployments.channel.frame_queue import FrameQueue
from app.deployments.channel.wire import FeedFrame, encode
from app.records.kv_events import KVEventLog
from app.records.load_report import LoadReport

LEASE_S = 10.0  # a Router asks `ping` every two seconds


class FeedHub:
    """All feeds of one engine replica."""

    def __init__(self, log: KVEventLog, lease_s: float = LEASE_S) -> None:
        self._log = log
        self._lease_s = lease_s
        self._feeds: dict[str, FrameQueue] = {}  # by router id

    @property
    def num_feeds(self) -> int:
        """Routers that listen."""
        return len(self._feeds)

    def open(self, router_id: str, load: LoadReport) -> FrameQueue:
        """A new feed, whose first frame is the snapshot; it replaces any other of the same Router."""
        if (old := self._feeds.get(router_id)) is not None:
            old.close()
        feed = self._feeds[router_id] = FrameQueue(router_id)
        feed.push(encode(FeedFrame(load, self._log.snapshot())))
        return feed

    def drop(self, feed: FrameQueue) -> None:
        """Its Router has gone; idempotent."""
        if self._feeds.get(feed.listener_id) is feed:
            del self._feeds[feed.listener_id]
        feed.close()

    def renew(self, router_id: str) -> None:
        """A Router was heard of."""
        if (feed := self._feeds.get(router_id)) is not None:
            feed.renew()

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
        for feed in [feed for feed in self._feeds.values() if feed.is_silent(self._lease_s)]:
            self.drop(feed)

    def close(self) -> None:
        """End all feeds: the replica is being replaced."""
        for feed in list(self._feeds.values()):
            self.drop(feed)
