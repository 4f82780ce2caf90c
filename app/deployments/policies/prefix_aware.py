"""Where the request costs least: seconds of prefill before its first token, plus the decode load that it adds.

    queue    prefill tokens queued there x seconds per prefill token
    prefill  tokens of the prompt that are not cached there x seconds per prefill token; tokens in host memory count
             as a quarter of computed ones, since they come back by a copy
    decode   expected output tokens x seconds per decode step x how full the replica is: the part of a decode step
             that grows with the batch, for as long as the request decodes
    eviction its new blocks push out as many others where the cache is full; a tenth of them is expected back

Seconds are the replica's own, from its heartbeats, so unequal replicas are compared rightly. What was routed after the
last report is added. A hot prefix spreads by itself: once the queue at its home costs more than a second prefill
elsewhere, elsewhere is cheaper. Beside that, a replica with more than twice the mean number of requests is passed over
while others are not: the cost of a decode load is an estimate, this is a bound.

The shape of the cost (uncached prefill plus decode load, both in one unit) follows NVIDIA Dynamo's router.
"""

from __future__ import annotations

from collections.abc import Sequence

from app.deployments.policies.base import NO_MATCHES, Cost, Decision, Matches, ReplicaLoad, RouteQuery, RoutingPolicy
from app.deployments.prefix_index import PrefixMatch
from app.deployments.wire import LoadReport

HOST_CREDIT = 0.75  # of a block in host memory, against one on the device
EVICTION_WEIGHT = 0.1  # share of evicted blocks that somebody asks for again
OVERLOAD = 2.0  # times the mean number of requests
OVERLOAD_SLACK = 4  # requests above the mean that are never an overload
SAME_S = 1e-6  # costs closer than this are equal
UNMEASURED_PREFILL_TOKEN_S = 1e-4
UNMEASURED_DECODE_STEP_S = 0.02

_NO_MATCH = PrefixMatch(0, 0)


class PrefixAware(RoutingPolicy):
    """Equal costs go to the one with the fewest tokens to process; those that are equal there too take turns."""

    uses_index = True

    def __init__(self) -> None:
        self._turn = 0

    def choose(
        self, candidates: Sequence[ReplicaLoad], query: RouteQuery, matches: Matches = NO_MATCHES, now: float = 0.0
    ) -> Decision:
        """See RoutingPolicy.choose."""
        speeds = _Speeds(candidates)
        costs = {load.report.replica_id: estimate(load, query, matches, speeds) for load in candidates}
        allowed = _not_overloaded(candidates)
        least = min(costs[load.report.replica_id].total_s for load in allowed) + SAME_S
        best = [load for load in allowed if costs[load.report.replica_id].total_s <= least]
        if len(best) > 1:
            fewest = min(load.outstanding_tokens for load in best)
            best = [load for load in best if load.outstanding_tokens == fewest]
        self._turn += 1
        return Decision(best[self._turn % len(best)].report.replica_id, costs)


class _Speeds:
    """What stands in for a time that a replica has not measured yet: the mean of those that have."""

    def __init__(self, candidates: Sequence[ReplicaLoad]) -> None:
        prefill = [s for load in candidates if (s := load.report.prefill_token_s) > 0]
        decode = [s for load in candidates if (s := load.report.decode_step_s) > 0]
        self.prefill_token_s = sum(prefill) / len(prefill) if prefill else UNMEASURED_PREFILL_TOKEN_S
        self.decode_step_s = sum(decode) / len(decode) if decode else UNMEASURED_DECODE_STEP_S


def uncached_tokens(report: LoadReport, query: RouteQuery, match: PrefixMatch) -> float:
    """Tokens of the prompt to prefill on a replica, at least the last one; loading from host memory counts in part."""
    cached = match.device_blocks + HOST_CREDIT * match.host_blocks
    return max(1.0, query.num_prompt_tokens - cached * report.block_size)


def estimate(load: ReplicaLoad, query: RouteQuery, matches: Matches, speeds: _Speeds) -> Cost:
    """The cost of a request on one replica."""
    report = load.report
    prefill_token_s = report.prefill_token_s or speeds.prefill_token_s
    decode_step_s = report.decode_step_s or speeds.decode_step_s
    uncached = uncached_tokens(report, query, matches.get(report.replica_id, _NO_MATCH))
    queue_s = (report.queued_prefill_tokens + load.routed_prefill_tokens) * prefill_token_s
    prefill_s = uncached * prefill_token_s
    kv_tokens = max(1, report.num_blocks * report.block_size)
    fullness = max(
        (report.resident_tokens + load.routed_tokens) / kv_tokens, load.num_requests / max(1, report.max_num_seqs)
    )
    decode_s = query.max_tokens * decode_step_s * fullness
    eviction_s = EVICTION_WEIGHT * prefill_s * min(1.0, load.indexed_blocks / max(1, report.num_blocks))
    return Cost(queue_s + prefill_s + decode_s + eviction_s, queue_s, prefill_s, decode_s, eviction_s)


def _not_overloaded(candidates: Sequence[ReplicaLoad]) -> Sequence[ReplicaLoad]:
    """Those with at most twice the mean number of requests; never empty."""
    if len(candidates) < 2:
        return candidates
    mean = sum(load.num_requests for load in candidates) / len(candidates)
    most = max(OVERLOAD * mean, mean + OVERLOAD_SLACK)
    return [load for load in candidates if load.num_requests <= most]
