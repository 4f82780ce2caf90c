"""The heartbeat of an engine replica: its load for Routers and ingresses, often while it is busy, else every second."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable

from app.deployments.channel.channel_hub import ChannelHub
from app.deployments.channel.feed_hub import FeedHub
from app.records.load_report import LoadReport

IDLE_HEARTBEAT_S = 1.0


class Heartbeat:
    """One replica's. `each_second` sees to the rest, once it has told the ingresses."""

    def __init__(
        self,
        interval_s: float,
        hub: ChannelHub,
        feeds: FeedHub,
        report: Callable[[], LoadReport],
        each_beat: Callable[[], None],
        each_second: Callable[[], None],
    ) -> None:
        self._interval_s = interval_s
        self._hub = hub
        self._feeds = feeds
        self._report = report
        self._each_beat = each_beat
        self._each_second = each_second
        self._busy = asyncio.Event()
        self._task = asyncio.create_task(self._run())

    def wake(self) -> None:
        """Something has come: beat again at the pace of a busy replica."""
        self._busy.set()

    def tell(self) -> None:
        """The load has changed by what an operator did: ingresses hear of it ahead of what comes next."""
        self._hub.heartbeat(self._report())
        self.wake()

    def cancel(self) -> None:
        """No more of it."""
        self._task.cancel()

    async def _run(self) -> None:
        last: LoadReport | None = None
        sent_s = checked_s = 0.0
        while True:
            # Fast until idleness has been reported once, or the replica would look busy for another second.
            if self._hub.num_streams or (last is not None and last.outstanding_tokens):
                await asyncio.sleep(self._interval_s)
            else:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._busy.wait(), IDLE_HEARTBEAT_S)
            self._busy.clear()
            self._each_beat()
            now = time.monotonic()
            report = self._report()
            if self._feeds.publish(report, force=report != last or now - sent_s >= IDLE_HEARTBEAT_S):
                last, sent_s = report, now
            if self._hub.retired:  # or Serve would wait for the Routers to let go
                self._feeds.close()
            if now - checked_s >= IDLE_HEARTBEAT_S:
                checked_s = now
                self._hub.heartbeat(report)
                self._each_second()
