"""The less loaded of two random replicas ("power of two choices": Mitzenmacher, 2001): robust when many routers act on
old reports."""

from __future__ import annotations

import random
from collections.abc import Sequence

from app.deployments.routing.policies.base import NO_MATCHES, Decision, Matches, ReplicaLoad, RouteQuery, RoutingPolicy


class PowerOfTwo(RoutingPolicy):
    """Load is counted in outstanding tokens. `seed` makes the draws repeatable."""

    def __init__(self, seed: int | None = None) -> None:
        self._random = random.Random(seed)

    def choose(
        self, candidates: Sequence[ReplicaLoad], query: RouteQuery, matches: Matches = NO_MATCHES, now: float = 0.0
    ) -> Decision:
        """See RoutingPolicy.choose."""
        drawn = self._random.sample(candidates, min(2, len(candidates)))
        return Decision(min(drawn, key=lambda candidate: candidate.outstanding_tokens).report.replica_id)
