"""All metrics of the application as one page, whichever ingress replica is asked; and those of one replica.

A balancer sends each scrape to another ingress: were its answer to lack the other ingresses' series, those would come
and go, and rates over them would break.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from app.deployments.channel.replica_pool import ReplicaPool
from app.deployments.channel.serve_port import EngineHandles, metrics_snapshots
from app.deployments.ingress.peers import Peers
from app.telemetry.exposition import render
from app.telemetry.metrics_recorder import Snapshot, decode_snapshot

TIMEOUT_S = 2.0  # for each replica; the page does without those that do not answer


class MetricsCollector:
    """Collects for one ingress: `own` gives its snapshot, `labels` tell it apart from the other ingresses."""

    def __init__(
        self,
        labels: Mapping[str, str],
        own: Callable[[], bytes],
        engines: Mapping[str, EngineHandles],
        routers: Any,
        peers: Peers,
    ) -> None:
        self._labels = dict(labels)
        self._own = own
        self._engines = engines
        self._routers = routers
        self._peers = peers

    async def text(self) -> str:
        """The exposition of all engine, Router and ingress replicas."""
        engines = asyncio.gather(*(handles.metrics_snapshots(TIMEOUT_S) for handles in self._engines.values()))
        others = await self._routers_and_ingresses()
        return render([*(decode_snapshot(one) for answers in await engines for one in answers), *others])

    async def names(self, pools: Mapping[str, ReplicaPool]) -> list[str]:
        """See Fleet.replica_names; engines are those of `pools`, by model."""
        loads = [channel.load for pool in pools.values() for channel in pool.live().values()]
        engines = [f"engine:{load.model}:{load.index}" for load in loads if load is not None]
        return sorted({*engines, *map(_name, await self._routers_and_ingresses())})

    async def one(self, name: str, pools: Mapping[str, ReplicaPool]) -> str | None:
        """See Fleet.replica_metrics."""
        if not name.startswith("engine:"):
            found = [one for one in await self._routers_and_ingresses() if _name(one) == name]
            return render(found) if found else None
        for model, pool in pools.items():
            for replica_id, channel in pool.live().items():
                if channel.load is not None and f"engine:{model}:{channel.load.index}" == name:
                    snapshot = await self._engines[model].metrics_snapshot_of(replica_id, TIMEOUT_S)
                    return None if snapshot is None else render([decode_snapshot(snapshot)])
        return None

    async def _routers_and_ingresses(self) -> list[Snapshot]:
        """Ours among them, whether or not Serve lets us hear ourselves."""
        answers = await asyncio.gather(
            metrics_snapshots(self._routers, TIMEOUT_S), metrics_snapshots(self._peers.handle(), TIMEOUT_S)
        )
        snapshots = [decode_snapshot(snapshot) for answer in answers for snapshot in answer]
        others = [snapshot for snapshot in snapshots if snapshot.labels != self._labels]
        return [*others, decode_snapshot(self._own())]


def _name(snapshot: Snapshot) -> str:
    """The name of an ingress or a Router, which has one label."""
    ((kind, replica_id),) = snapshot.labels.items()
    return f"{kind}:{replica_id}"
