"""Requests of one session go to one replica: needs no index, so it also serves engines without KV events."""

from __future__ import annotations

from app.deployments.routing.policies.affinity import Affinity
from app.deployments.routing.policies.base import RouteQuery


class SessionAffinity(Affinity):
    """Binds requests by their session; where the client names none, the prompt's first block stands for it."""

    def key(self, query: RouteQuery) -> bytes:
        """See Affinity.key."""
        if query.session:
            return query.session.encode()
        return query.block_hashes[0] if query.block_hashes else b""
