"""Chooses as Ray Serve does for multiplexed models, in the simulation: of the replicas that have the adapter in memory,
or else of those with the fewest, two are drawn, and the one with fewer requests gets it."""

from __future__ import annotations

import random
from collections.abc import Sequence

from app.deployments.routing.policies.base import NO_MATCHES, Decision, Matches, ReplicaLoad, RouteQuery, RoutingPolicy


class ServeMultiplexing(RoutingPolicy):
    """Reads what lies on disk as `SimAdapters` tells it: all but so many."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def choose(
        self, candidates: Sequence[ReplicaLoad], query: RouteQuery, matches: Matches = NO_MATCHES, now: float = 0.0
    ) -> Decision:
        """See RoutingPolicy.choose."""
        those = [load for load in candidates if query.adapter not in load.report.adapters.on_disk]
        if not those:
            fewest = min(len(load.report.adapters.on_disk) for load in candidates)
            those = [load for load in candidates if len(load.report.adapters.on_disk) == fewest]
        drawn = self._random.sample(those, min(2, len(those)))
        return Decision(min(drawn, key=lambda load: load.num_requests).report.replica_id)
