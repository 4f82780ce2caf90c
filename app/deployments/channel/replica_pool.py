"""One model's engine replicas as one ingress sees them: finds them, keeps a channel to each, lets go of retired ones.

A replica that Serve has taken out of service is no longer asked `ping`; its channel takes no new requests, and is
closed once the running ones are done or, after `move_after_s`, have gone on elsewhere: Serve waits for that before it
stops the replica. Where no other one serves they stay as long as Serve lets them, and then wait for one. A replica that
hangs delays nobody: the others are found, and a channel that does not open is given up and tried again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection

from app.config.ingress import IngressConfig
from app.deployments.channel.channel_client import ChannelClient, ReplicaPort
from app.deployments.channel.replica_finder import Discover, Discovery, ReplicaFinder
from app.deployments.routing.load_book import LoadBook
from app.deployments.routing.policies.base import RouteQuery
from app.deployments.routing.policies.power_of_two import PowerOfTwo
from app.records.adapter import KnownAdapter
from app.records.load_report import LoadReport

OPEN_TIMEOUT_S = 10.0
LAST_PART = 2 / 3  # of the time that Serve gives a replica: then everything leaves it


class ReplicaPool:
    """Live channels by replica id. Lives on one event loop."""

    def __init__(
        self,
        model: str,
        ingress_id: str,
        config: IngressConfig,
        discover: Discover,
        connect: Callable[[str], ReplicaPort],
        shutdown_s: float = 30.0,
        on_report: Callable[[ReplicaPool], None] = lambda pool: None,
    ) -> None:
        """`shutdown_s`: what Serve gives a replica to end in; `on_report`: a replica has told of itself."""
        self._on_report = on_report
        self.model = model
        self.num_lost = 0  # channels that broke while in use
        self.num_ingresses = config.num_replicas or 1  # those that send to these replicas
        self._ingress_id = ingress_id
        self._config = config
        self._connect = connect
        self._leave_after_s = LAST_PART * shutdown_s
        self._move_after_s = min(config.move_after_s, self._leave_after_s)
        self.book = LoadBook(PowerOfTwo())
        self._channels: dict[str, ChannelClient] = {}
        self._openings: set[asyncio.Task[None]] = set()
        self.finder = ReplicaFinder(model, discover, self._update, lambda: bool(self.live()))

    @property
    def kv_tokens(self) -> int | None:
        """Tokens that the KV cache of one replica holds; None while no replica is known."""
        loads = [channel.load for channel in self._channels.values() if channel.load is not None]
        return min((load.num_blocks * load.block_size for load in loads), default=None)

    @property
    def load(self) -> LoadReport | None:
        """Any replica's last report, for what all have in common: block size and model revision."""
        return next((channel.load for channel in self.live().values() if channel.load is not None), None)

    @property
    def adapters(self) -> frozenset[KnownAdapter]:
        """Those that any of its replicas serves."""
        loads = (channel.load for channel in self.live().values())
        return frozenset(adapter for load in loads if load is not None for adapter in load.adapters.known)

    def live(self) -> dict[str, ChannelClient]:
        """The channels that take new requests."""
        return {name: channel for name, channel in self._channels.items() if channel.is_live}

    @property
    def held(self) -> str:
        """Why new requests would wait wherever they were sent; empty where a replica goes on with its work."""
        reasons = [channel.held for channel in self.live().values()]
        return reasons[0] if reasons and all(reasons) else ""

    def choose(self, query: RouteQuery, allowed: Collection[str]) -> str:
        """The less loaded of two of `allowed` (at least one), as far as this ingress can tell. They were live a moment
        ago: where none is any more, one of them is named all the same."""
        decision = self.book.route(query, allowed)
        if decision is not None:
            return decision.replica_id
        channels = [self._channels[name] for name in allowed if name in self._channels]
        if not channels:
            return next(iter(allowed))
        return min(channels, key=lambda one: one.outstanding_tokens).replica_id

    def count_request(self, replica_id: str, query: RouteQuery) -> None:
        """Count a request for which somebody else chose."""
        self.book.count_request(replica_id, query)

    async def close(self) -> None:
        """End all channels."""
        await self.finder.close()
        for channel in self._channels.values():
            channel.close()
        await asyncio.sleep(0)

    def _update(self, discovery: Discovery) -> None:
        for name, channel in list(self._channels.items()):
            if channel.state == "closed":
                del self._channels[name]
            elif name in discovery.present:
                channel.revive()
            elif discovery.complete:
                self._let_go(channel)
        for name in sorted(discovery.present - self._channels.keys()):
            opening = asyncio.create_task(self._see_open(self._open(name)))
            self._openings.add(opening)
            opening.add_done_callback(self._openings.discard)

    def _let_go(self, channel: ChannelClient) -> None:
        """Serve has taken the replica out of service."""
        if channel.state != "draining":
            channel.drain()
            self.finder.search_soon()  # look often: for another one, and whether it is time to move
        if channel.has_drained_for(self._move_after_s if self.live() else self._leave_after_s):
            channel.move_requests("it is taken out of service")

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
            kept_bytes=self._config.media.cache_bytes,
            on_load=self._report,
            on_closed=self._remove,
        )
        self._channels[replica_id] = channel
        channel.start()
        return channel

    def _report(self, load: LoadReport) -> None:
        self.book.report(load)
        self._on_report(self)

    def _remove(self, channel: ChannelClient, num_requests: int) -> None:
        self.num_lost += num_requests > 0
        self.book.remove(channel.replica_id)
        self.finder.search_soon()
