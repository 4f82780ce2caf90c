"""The replica with the fewest tokens still to process: long prompts and long answers weigh what they cost."""

from __future__ import annotations

from collections.abc import Sequence

from app.deployments.routing.policies.base import NO_MATCHES, Decision, Matches, ReplicaLoad, RouteQuery, RoutingPolicy


class LeastOutstandingTokens(RoutingPolicy):
    """Equally loaded replicas take turns, so that an idle deployment spreads its requests too."""

    def __init__(self) -> None:
        self._turn = 0

    def choose(
        self, candidates: Sequence[ReplicaLoad], query: RouteQuery, matches: Matches = NO_MATCHES, now: float = 0.0
    ) -> Decision:
        """See RoutingPolicy.choose."""
        fewest = min(candidate.outstanding_tokens for candidate in candidates)
        best = [candidate for candidate in candidates if candidate.outstanding_tokens == fewest]
        self._turn += 1
        return Decision(best[self._turn % len(best)].report.replica_id)
