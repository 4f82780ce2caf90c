"""All metrics of the application as one page, whichever ingress replica is asked.

A balancer sends each scrape to another ingress: were its answer to lack the other ingresses' series, those would come
and go, and rates over them would break.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from app.deployments.channel.serve_port import EngineHandles, metrics_snapshots
from app.deployments.peers import Peers
from app.telemetry.metrics import decode_snapshot, render

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
        answers = await asyncio.gather(
            *(handles.metrics_snapshots(TIMEOUT_S) for handles in self._engines.values()),
            metrics_snapshots(self._routers, TIMEOUT_S),
            metrics_snapshots(self._peers.handle(), TIMEOUT_S),
        )
        snapshots = [decode_snapshot(snapshot) for answer in answers for snapshot in answer]
        others = [snapshot for snapshot in snapshots if snapshot.labels != self._labels]
        return render([*others, decode_snapshot(self._own())])  # our own whether or not Serve lets us hear ourselves
