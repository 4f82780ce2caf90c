"""The less loaded of two replicas drawn at random: robust when many routers act on old reports."""

from __future__ import annotations

import random
from collections.abc import Sequence

from app.deployments.policies.base import ReplicaLoad, RouteQuery, RoutingPolicy


class PowerOfTwo(RoutingPolicy):
    """Load is counted in outstanding tokens."""

    def __init__(self) -> None:
        self._random = random.Random()

    def choose(self, candidates: Sequence[ReplicaLoad], query: RouteQuery) -> ReplicaLoad:
        """See RoutingPolicy.choose."""
        drawn = self._random.sample(candidates, min(2, len(candidates)))
        return min(drawn, key=lambda candidate: candidate.outstanding_tokens)
