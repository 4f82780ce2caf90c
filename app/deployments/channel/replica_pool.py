"""One model's engine replicas as one ingress sees them: finds them, keeps a channel to each, lets go of retired ones.

A replica that Serve has taken out of service is no longer asked `hello`; its channel takes no new requests and is
closed once the running ones are done, which is what Serve waits for before it stops the replica. A replica that hangs
delays nobody: the others are found, and a channel that does not open is given up and tried again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass

from app.config import IngressConfig
from app.deployments.channel.channel_client import ChannelClient, ReplicaPort
from app.deployments.channel.wire import LoadReport
from app.deployments.routing.load_book import LoadBook
from app.deployments.routing.policies.base import RouteQuery
from app.deployments.routing.policies.power_of_two import PowerOfTwo

SEARCH_INTERVAL_S = 2.0
EAGER_INTERVAL_S = 0.25  # while no replica is live, or others are expected
EAGER_S = 30.0  # after the start and after a loss, others are expected for so long
OPEN_TIMEOUT_S = 10.0

logger = logging.getLogger("manta.ingress")


@dataclass(slots=True, frozen=True)
class RollCall:
    """Which replicas answered when all running ones were asked."""

    present: frozenset[str]  # replica ids
    complete: bool  # all did: whoever is not present is retired
    reports: tuple[LoadReport, ...] = ()  # their answers


Discover = Callable[[], Awaitable[RollCall]]


class ReplicaPool:
    """Live channels by replica id. Lives on one event loop."""

    def __init__(
        self,
        model: str,
        ingress_id: str,
        config: IngressConfig,
        discover: Discover,
        connect: Callable[[str], ReplicaPort],
    ) -> None:
        self.model = model
        self.num_lost = 0  # channels that broke while in use
        self._ingress_id = ingress_id
        self._config = config
        self._discover = discover
        self._connect = connect
        self._book = LoadBook(PowerOfTwo())
        self._channels: dict[str, ChannelClient] = {}
        self._openings: set[asyncio.Task[None]] = set()
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._closed = False
        self._eager_until = time.monotonic() + EAGER_S

    @property
    def is_searching(self) -> bool:
        """Whether the search for replicas runs, as it should from `start` to `close`."""
        return self._task is not None and not self._task.done()

    @property
    def kv_tokens(self) -> int | None:
        """Tokens that the KV cache of one replica holds; None while no replica is known."""
        loads = [channel.load for channel in self._channels.values() if channel.load is not None]
        return min((load.num_blocks * load.block_size for load in loads), default=None)

    @property
    def load(self) -> LoadReport | None:
        """Any replica's last report, for what all have in common: block size and model revision."""
        return next((channel.load for channel in self.live().values() if channel.load is not None), None)

    def start(self) -> None:
        """Look for replicas from now on."""
        self._task = asyncio.create_task(self._search())

    def live(self) -> dict[str, ChannelClient]:
        """The channels that take new requests."""
        return {name: channel for name, channel in self._channels.items() if channel.is_live}

    def choose(self, query: RouteQuery, allowed: Collection[str]) -> str:
        """The less loaded of two of `allowed` (live replicas, at least one), as far as this ingress can tell."""
        decision = self._book.route(query, allowed)
        if decision is not None:
            return decision.replica_id
        return min(allowed, key=lambda name: self._channels[name].outstanding_tokens)

    def routed(self, replica_id: str, query: RouteQuery) -> None:
        """Somebody else chose: remember the load."""
        self._book.routed(replica_id, query)

    async def close(self) -> None:
        """End all channels."""
        self._closed = True
        if self._task is not None:
            self._task.cancel()
        for channel in self._channels.values():
            channel.close()
        await asyncio.sleep(0)

    async def _search(self) -> None:
        while not self._closed:
            try:
                roll_call = await self._discover()
                if not self._closed:
                    self._update(roll_call)
            except asyncio.CancelledError:
                raise
            except Exception:  # the search must outlive any trouble of the control plane
                logger.exception("search for the replicas of %s failed", self.model)
            eager = time.monotonic() < self._eager_until or not self.live()
            interval_s = EAGER_INTERVAL_S if eager else SEARCH_INTERVAL_S
            try:
                await asyncio.wait_for(self._wake.wait(), interval_s)
                await asyncio.sleep(EAGER_INTERVAL_S)
            except TimeoutError:
                pass
            self._wake.clear()

    def _update(self, roll_call: RollCall) -> None:
        for name, channel in list(self._channels.items()):
            if channel.state == "closed":
                del self._channels[name]
            elif name in roll_call.present:
                channel.revive()
            elif roll_call.complete:
                channel.drain()
        for name in sorted(roll_call.present - self._channels.keys()):
            opening = asyncio.create_task(self._see_open(self._open(name)))
            self._openings.add(opening)
            opening.add_done_callback(self._openings.discard)

    async def _see_open(self, channel: ChannelClient) -> None:
        if not await channel.wait_open(OPEN_TIMEOUT_S):
            channel.close(f"it did not open within {OPEN_TIMEOUT_S:g} s")  # the next search tries again

    def _open(self, replica_id: str) -> ChannelClient:
        channel = ChannelClient(
            self._connect(replica_id),
            replica_id,
            self._ingress_id,
            window=self._config.credit_window_tokens,
            lease_s=self._config.lease_s,
            on_load=self._book.report,
            on_closed=self._lost,
        )
        self._channels[replica_id] = channel
        channel.start()
        return channel

    def _lost(self, channel: ChannelClient, num_requests: int) -> None:
        self.num_lost += num_requests > 0
        self._book.remove(channel.replica_id)
        self._eager_until = time.monotonic() + EAGER_S
        self._wake.set()
