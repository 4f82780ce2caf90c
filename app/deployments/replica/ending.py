"""The end of an engine replica's process: requests are told, the last frames leave, then it exits.

Serve replaces a dead replica in seconds, an unhealthy one much later. So whatever is fatal ends the process.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable

from app.deployments.channel.channel_hub import ChannelHub, TokenChannel
from app.deployments.channel.feed_hub import FeedHub

EXIT_GRACE_S = 1.0  # the last frames get so long to leave before the process exits

logger = logging.getLogger("manta.engine")


class Ending:
    """One replica's; begins once."""

    def __init__(
        self, model: str, replica_id: str, hub: ChannelHub, feeds: FeedHub, shut_down: Callable[[], None]
    ) -> None:
        """`shut_down` stops the engine; it may block."""
        self.why: str | None = None  # None: the replica lives
        self._model = model
        self._replica_id = replica_id
        self._hub = hub
        self._feeds = feeds
        self._shut_down = shut_down
        self._task: asyncio.Task[None] | None = None

    def fail(self, error: BaseException) -> None:
        """The engine has died: every ingress is told, and goes on elsewhere."""
        if self.why is None:
            why = f"the engine of model {self._model} died: {error}"
            logger.error("%s", why)
            self._begin(why, lambda: self._hub.fail(why))

    def go(self, why: str) -> None:
        """Let every request go on elsewhere; the engine lives so long."""
        if self.why is None:
            why = f"engine replica {self._replica_id} {why}"
            logger.warning("%s; %d requests go on elsewhere", why, self._hub.num_streams)
            self._begin(why, self._hub.give_up)

    def check_joined(self, joining: asyncio.Task[None]) -> None:
        """End a replica that cannot join its fleet and would take no requests for ever: Serve starts another."""
        if not joining.cancelled() and (error := joining.exception()) is not None:
            self.go(f"could not join its fleet: {type(error).__name__}: {error}")

    def _begin(self, why: str, let_go: Callable[[], None]) -> None:
        self.why = why
        channels = list(self._hub.channels)
        let_go()
        self._feeds.close()
        self._task = asyncio.create_task(self._exit(channels))

    async def _exit(self, channels: list[TokenChannel]) -> None:
        for channel in channels:
            await channel.wait_flushed(EXIT_GRACE_S)
        with contextlib.suppress(Exception):  # a worker that hangs must not outlive the replica
            await asyncio.wait_for(asyncio.to_thread(self._shut_down), EXIT_GRACE_S)
        await asyncio.sleep(0.1)  # the transport's own buffers
        logging.shutdown()
        os._exit(1)
