"""Requests of one adapter go to one replica, so that few adapters are loaded on each."""

from __future__ import annotations

from app.deployments.routing.policies.affinity import Affinity
from app.deployments.routing.policies.base import RouteQuery


class AdapterAffinity(Affinity):
    """Requests to the base model go to the replica with the fewest tokens to process."""

    def key(self, query: RouteQuery) -> bytes:
        """See Affinity.key."""
        return query.adapter.encode()
