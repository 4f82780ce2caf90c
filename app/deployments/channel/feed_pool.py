"""Router side of the feeds: finds one model's engine replicas, keeps a feed from each, and fills book and index.

A feed that ends, or that misses a batch, takes its replica out of the index at once; opening it anew brings a snapshot.
So does the first search of a Router that has just started: it knows every cache as soon as every replica has answered.
A replica that Serve has taken out of service is let go, so that it can stop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Protocol

from app.deployments.channel.replica_finder import Discover, Discovery, ReplicaFinder
from app.deployments.channel.wire import FeedFrame, decode_feed
from app.deployments.routing.load_book import LoadBook

logger = logging.getLogger("manta.router")


class FeedPort(Protocol):
    """Reaches one engine replica; over a Serve handle in the Router, in memory in tests."""

    def open_feed(self, router_id: str) -> AsyncGenerator[bytes, None]:
        """The replica's frames."""


class FeedPool:
    """Feeds by replica id. Lives on one event loop. `book.index` may be None: then only loads are taken."""

    def __init__(
        self, model: str, router_id: str, book: LoadBook, discover: Discover, connect: Callable[[str], FeedPort]
    ) -> None:
        self.model = model
        self.book = book
        self.num_batches = 0  # batches of KV events that were applied
        self.num_gaps = 0  # feeds opened anew because a batch was missing
        self._router_id = router_id
        self._connect = connect
        self._feeds: dict[str, asyncio.Task[None]] = {}
        self.finder = ReplicaFinder(model, discover, self._update, lambda: bool(self._feeds))

    @property
    def num_feeds(self) -> int:
        """Replicas that are being listened to."""
        return len(self._feeds)

    async def close(self) -> None:
        """End all feeds."""
        await self.finder.close()
        tasks = list(self._feeds.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _update(self, discovery: Discovery) -> None:
        for report in discovery.reports:
            if report.replica_id not in self._feeds:
                self.book.report(report)  # all at once: a Router that knew one replica only would send everything there
        for name in sorted(discovery.present - self._feeds.keys()):
            self._feeds[name] = asyncio.create_task(self._listen(name))
        if discovery.complete:
            for name in self._feeds.keys() - discovery.present:
                self._feeds[name].cancel()

    async def _listen(self, replica_id: str) -> None:
        """One feed from its opening to its end."""
        try:
            async with aclosing(self._connect(replica_id).open_feed(self._router_id)) as frames:
                async for data in frames:
                    if not self._take(decode_feed(data)):
                        self.num_gaps += 1
                        break
        except asyncio.CancelledError:
            raise
        except Exception as error:  # whatever the transport raises: the replica is out of reach
            logger.debug("feed of %s lost: %s", replica_id, error)
        finally:
            self._feeds.pop(replica_id, None)
            self.book.remove(replica_id)
            if self.book.index is not None:
                self.book.index.drop(replica_id)
            self.finder.search_soon()

    def _take(self, frame: FeedFrame) -> bool:
        """False when something is missing before this frame."""
        outcome = None
        if frame.events is not None and self.book.index is not None:
            self.num_batches += 1
            outcome = self.book.index.apply(frame.events)
        self.book.report(frame.load)  # last, because it also counts what the index has by now
        return outcome != "gap"
