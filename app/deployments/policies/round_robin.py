"""Replicas in turn, whatever their load: the baseline that other policies are measured against."""

from __future__ import annotations

from collections.abc import Sequence

from app.deployments.policies.base import ReplicaLoad, RouteQuery, RoutingPolicy


class RoundRobin(RoutingPolicy):
    """One counter."""

    def __init__(self) -> None:
        self._turn = 0

    def choose(self, candidates: Sequence[ReplicaLoad], query: RouteQuery) -> ReplicaLoad:
        """See RoutingPolicy.choose."""
        self._turn += 1
        return candidates[self._turn % len(candidates)]
