"""The part that the affinity policies share: equal keys go to one replica, unless that one has clearly more than the
mean.

Rendezvous hashing (Thaler and Ravishankar, 1998): each replica has a rank for each key, the first one takes it. A
replica that comes or goes moves only the keys it gains or loses. Past the bound, a key goes to its next replica in rank
(consistent hashing with bounded loads: Mirrokni, Thorup and Zadimoghaddam, 2018).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from hashlib import blake2b

from app.deployments.routing.policies.base import NO_MATCHES, Decision, Matches, ReplicaLoad, RouteQuery, RoutingPolicy
from app.deployments.routing.policies.least_outstanding_tokens import LeastOutstandingTokens

BOUND = 1.5  # times the mean number of requests
BOUND_SLACK = 4  # requests above the mean that are always allowed


class Affinity(RoutingPolicy):
    """A request without a key goes to the replica with the fewest tokens to process."""

    def __init__(self) -> None:
        self._otherwise = LeastOutstandingTokens()

    @abstractmethod
    def key(self, query: RouteQuery) -> bytes:
        """Returns what binds requests together; empty when nothing does."""

    def choose(
        self, candidates: Sequence[ReplicaLoad], query: RouteQuery, matches: Matches = NO_MATCHES, now: float = 0.0
    ) -> Decision:
        """See RoutingPolicy.choose."""
        key = self.key(query)
        if not key:
            return self._otherwise.choose(candidates, query, matches, now)
        mean = sum(load.num_requests for load in candidates) / len(candidates)
        most = max(BOUND * mean, mean + BOUND_SLACK)
        fit = [load for load in candidates if load.num_requests <= most]
        return Decision(max(fit, key=lambda load: _rank(key, load.report.replica_id)).report.replica_id)


def _rank(key: bytes, replica_id: str) -> bytes:
    name = replica_id.encode()
    return blake2b(len(key).to_bytes(4, "little") + key + name, digest_size=8).digest()
