"""The load book: how busy each replica of one model is, from its reports and from what was routed since.

Used by the Router, and by each ingress for the time when the Router does not answer. A replica that stops reporting
vanishes from the book.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from app.deployments.policies.base import ReplicaLoad, RouteQuery, RoutingPolicy
from app.deployments.wire import LoadReport

REPORT_EXPIRES_S = 4.0  # an idle replica reports every second
REPORT_AGE_S = 0.05  # a report may have been written this long before it arrived


@dataclass(slots=True)
class _Entry:
    load: ReplicaLoad
    reported_s: float
    routed: deque[tuple[float, int]] = field(default_factory=deque)  # (time, tokens), oldest first

    def settle(self, until_s: float) -> None:
        """Forget what the replica's own report counts by now."""
        while self.routed and self.routed[0][0] < until_s:
            self.load.routed_tokens -= self.routed.popleft()[1]


class LoadBook:
    """One model's replicas. Not thread-safe: one event loop uses it."""

    def __init__(self, policy: RoutingPolicy, clock: Callable[[], float] = time.monotonic) -> None:
        self._policy = policy
        self._clock = clock
        self._entries: dict[str, _Entry] = {}

    def report(self, report: LoadReport) -> None:
        """Take a replica's report; one that accepts nothing leaves the book."""
        if not report.accepting:
            self._entries.pop(report.replica_id, None)
            return
        now = self._clock()
        entry = self._entries.get(report.replica_id)
        if entry is None or entry.load.report.incarnation != report.incarnation:
            self._entries[report.replica_id] = _Entry(ReplicaLoad(report, 0), now)
            return
        entry.load.report = report
        entry.reported_s = now
        entry.settle(now - REPORT_AGE_S)

    def remove(self, replica_id: str) -> None:
        """The replica is gone."""
        self._entries.pop(replica_id, None)

    def replicas(self) -> list[ReplicaLoad]:
        """Those heard of lately, in the order of their ids."""
        expired = self._clock() - REPORT_EXPIRES_S
        for replica_id in [name for name, entry in self._entries.items() if entry.reported_s < expired]:
            del self._entries[replica_id]
        return [self._entries[name].load for name in sorted(self._entries)]

    def route(self, query: RouteQuery, allowed: Collection[str] | None = None) -> str | None:
        """The replica for a request, whose tokens then count as routed; None when no (allowed) replica is known."""
        candidates = [load for load in self.replicas() if allowed is None or load.report.replica_id in allowed]
        if not candidates:
            return None
        replica_id = self._policy.choose(candidates, query).report.replica_id
        self.routed(replica_id, query)
        return replica_id

    def routed(self, replica_id: str, query: RouteQuery) -> None:
        """Count a request as sent to a replica."""
        entry = self._entries.get(replica_id)
        if entry is not None:
            entry.routed.append((self._clock(), query.num_tokens))
            entry.load.routed_tokens += query.num_tokens
