"""Replicas in turn, whatever their load: the baseline that other policies are measured against."""

from __future__ import annotations

from collections.abc import Sequence

from app.deployments.routing.policies.base import NO_MATCHES, Decision, Matches, ReplicaLoad, RouteQuery, RoutingPolicy


class RoundRobin(RoutingPolicy):
    """One counter."""

    def __init__(self) -> None:
        self._turn = 0

    def choose(
        self, candidates: Sequence[ReplicaLoad], query: RouteQuery, matches: Matches = NO_MATCHES, now: float = 0.0
    ) -> Decision:
        """See RoutingPolicy.choose."""
        self._turn += 1
        return Decision(candidates[self._turn % len(candidates)].report.replica_id)
