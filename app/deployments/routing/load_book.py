"""The load book: how busy each replica of one model is, from its reports and from what was routed since.

Used by the Router, and by each ingress for the time when the Router does not answer. A replica that stops reporting
vanishes from the book. With an index, the policy is told what of the prompt each replica has cached.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from app.deployments.routing.claim import NO_CLAIM, Claim
from app.deployments.routing.policies.base import (
    NO_MATCHES,
    NOTHING,
    Cost,
    Decision,
    Level,
    Matches,
    ReplicaLoad,
    Routed,
    RouteQuery,
    RoutingPolicy,
)
from app.deployments.routing.policies.load_table import LoadTable
from app.deployments.routing.prefix_index import PrefixIndex, PrefixMatch
from app.records.load_report import LoadReport

REPORT_EXPIRES_S = 4.0  # an idle replica reports every second
REPORT_AGE_S = 0.05  # a report may have been written this long before it arrived


class Choice(NamedTuple):
    """A decision, and what it was made from."""

    decision: Decision
    candidates: Sequence[ReplicaLoad]
    matches: Matches


@dataclass(slots=True)
class _Entry:
    load: ReplicaLoad
    reported_s: float

    def settle(self, until_s: float) -> None:
        """Forget what the replica's own report counts by now."""
        load = self.load
        while load.routed and load.routed[0].at_s < until_s:
            settled = load.routed.popleft()
            load.routed_tokens -= settled.tokens
            load.routed_prefill_tokens -= settled.prefill_tokens
            load.routed_requests -= settled.num_prompts


class LoadBook:
    """One model's replicas. Not thread-safe: one event loop uses it."""

    def __init__(
        self,
        policy: RoutingPolicy,
        clock: Callable[[], float] = time.monotonic,
        index: PrefixIndex | None = None,
    ) -> None:
        self.index = index
        self._policy = policy
        self._clock = clock
        self._entries: dict[str, _Entry] = {}
        self._table: LoadTable | None = None  # in the order of replica ids; None when to be made anew
        self._expires_s = 0.0  # no entry expires before

    def report(self, report: LoadReport) -> None:
        """Take a replica's report; one that accepts nothing leaves the book."""
        if not report.accepting:
            self.remove(report.replica_id)
            return
        now = self._clock()
        entry = self._entries.get(report.replica_id)
        if entry is None or entry.load.report.incarnation != report.incarnation:
            entry = self._entries[report.replica_id] = _Entry(ReplicaLoad(report), now)
            self._table = None
        entry.load.report = report
        entry.reported_s = now
        entry.settle(now - REPORT_AGE_S)
        if self.index is not None:
            entry.load.indexed_blocks = self.index.num_blocks(report.replica_id)
        self._refresh(report.replica_id)

    def remove(self, replica_id: str) -> None:
        """The replica is gone."""
        if self._entries.pop(replica_id, None) is not None:
            self._table = None

    def replicas(self) -> list[ReplicaLoad]:
        """Those heard of lately, in the order of their ids."""
        return list(self._candidates())

    def load(self, replica_id: str) -> ReplicaLoad:
        """Returns how busy a known replica is."""
        return self._entries[replica_id].load

    @property
    def names(self) -> set[str]:
        """The ids of those that it knows."""
        return set(self._entries)

    def decide(
        self, query: RouteQuery, allowed: Collection[str] | None = None, *, explain: bool = False
    ) -> Choice | None:
        """The policy's choice and what it knew; nothing is counted. None when nobody (allowed) is known.

        With `explain`, the index is asked even if the policy does not need it.
        """
        candidates: Sequence[ReplicaLoad] = self._candidates()
        if allowed is not None:
            candidates = [load for load in candidates if load.report.replica_id in allowed]
        if not candidates:
            return None
        now = self._clock()
        index = self.index if self._policy.uses_index or explain else None
        matches = NO_MATCHES
        if index is not None:
            matches = index.match(query.block_hashes, now)
        decision = self._policy.choose(candidates, query, matches, now)
        match = matches.get(decision.replica_id, decision.match)
        level: Level = "load"
        if index is not None and self._policy.uses_index and query.block_hashes:
            level = "exact" if index.is_synced(decision.replica_id) else "speculative" if match != (0, 0) else "load"
        return Choice(Decision(decision.replica_id, level, match), candidates, matches)

    def route(self, query: RouteQuery, allowed: Collection[str] | None = None) -> Decision | None:
        """The replica for a request, whose tokens then count as routed; None when no (allowed) replica is known."""
        choice = self.decide(query, allowed)
        if choice is None:
            return None
        self.count_request(choice.decision.replica_id, query, choice.decision.match)
        return choice.decision

    def costs(self, query: RouteQuery, choice: Choice) -> dict[str, Cost]:
        """Estimates what the request would cost on each candidate, where the policy estimates that."""
        return self._policy.costs(choice.candidates, query, choice.matches)

    def count_request(
        self, replica_id: str, query: RouteQuery, match: PrefixMatch = NOTHING, claim: Claim = NO_CLAIM
    ) -> None:
        """Count a request as sent to a replica, which will soon have its blocks."""
        entry = self._entries.get(replica_id)
        if entry is None:
            return
        now = self._clock()
        load = entry.load
        prefill_tokens = max(1, query.num_prompt_tokens - sum(match) * load.report.block_size)
        number = query.num_prompts
        load.routed.append(Routed(now, query.num_tokens, query.num_prompt_tokens, prefill_tokens, claim, number))
        load.routed_tokens += query.num_tokens
        load.routed_prefill_tokens += prefill_tokens
        load.routed_requests += number
        if self.index is not None and self._policy.uses_index:
            # The last full block of a prompt, with two tokens left behind it (engine/kv_cache/state_manager.py).
            num_hashed = query.num_hashed_tokens or query.num_prompt_tokens
            num_to_state = (num_hashed - 2) // load.report.block_size
            self.index.expect_blocks(replica_id, query.block_hashes, now, match.device_blocks, num_to_state)
        self._refresh(replica_id)

    def _candidates(self) -> LoadTable:
        now = self._clock()
        if now > self._expires_s:
            for name in [name for name, entry in self._entries.items() if entry.reported_s < now - REPORT_EXPIRES_S]:
                self.remove(name)
            oldest = min((entry.reported_s for entry in self._entries.values()), default=now)
            self._expires_s = oldest + REPORT_EXPIRES_S
        if self._table is None:
            self._table = LoadTable([self._entries[name].load for name in sorted(self._entries)])
        return self._table

    def _refresh(self, replica_id: str) -> None:
        if self._table is not None:
            self._table.refresh(self._table.position[replica_id])
