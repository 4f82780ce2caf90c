"""Each session stays on one replica, by the digest of its name; requests without one go to the least busy."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from app.deployments.routing.policies.base import NO_MATCHES, Decision, Matches, ReplicaLoad, RouteQuery, RoutingPolicy


class Sticky(RoutingPolicy):
    """Rendezvous hashing: a replica that leaves moves only its own sessions."""

    def choose(
        self, candidates: Sequence[ReplicaLoad], query: RouteQuery, matches: Matches = NO_MATCHES, now: float = 0.0
    ) -> Decision:
        """See RoutingPolicy."""
        if not query.session:
            return Decision(min(candidates, key=lambda each: each.outstanding_tokens).report.replica_id)
        return Decision(max(candidates, key=lambda each: _rank(each, query)).report.replica_id)


def _rank(candidate: ReplicaLoad, query: RouteQuery) -> bytes:
    return hashlib.blake2b(f"{query.session}/{candidate.report.replica_id}".encode(), digest_size=8).digest()
