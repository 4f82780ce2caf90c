"""Where the request costs least: seconds of prefill before its first token, plus the decode load that it adds.

    queue    prefill tokens queued there x seconds per prefill token
    prefill  tokens of the prompt that are not cached there x seconds per prefill token; tokens in host memory count
             as a quarter of computed ones, since they come back by a copy
    decode   expected output tokens x seconds per decode step x half of how full the replica is: the part of a decode
             step that grows with the batch, for as long as the request decodes
    eviction its new blocks push out as many others where the cache is full; a tenth of them is expected back

Seconds are measured by the replicas, and told in heartbeats. They are noisy, and a replica that looks slow gets few
requests to show that it no longer is; so up to a factor of two from the median counts as equal, and of more than that
only what is beyond. What was routed after the last report is added. A hot prefix spreads by itself: once the queue at
its home costs more than a second prefill elsewhere, elsewhere is cheaper. Beside that, a replica with more than twice
the mean number of requests is passed over while others are not: the decode load is an estimate, this is a bound.

The shape of the cost (uncached prefill plus decode load, both in one unit) follows NVIDIA Dynamo's router.
"""

from __future__ import annotations

from collections.abc import Sequence

from app.deployments.policies.base import NO_MATCHES, Cost, Decision, Matches, ReplicaLoad, RouteQuery, RoutingPolicy

HOST_CREDIT = 0.75  # of a block in host memory, against one on the device
EVICTION_WEIGHT = 0.1  # share of evicted blocks that somebody asks for again
DECODE_GROWTH = 0.5  # of a decode step at a full cache
NOISE = 2.0  # times slower or faster than the median that a replica may seem by chance
MOST_UNEQUAL = 4.0  # times slower or faster than the median that a replica may count as
OVERLOAD = 2.0  # times the mean number of requests
OVERLOAD_SLACK = 4  # requests above the mean that are never an overload
SAME_S = 1e-6  # costs closer than this are equal
UNMEASURED_PREFILL_TOKEN_S = 1e-4
UNMEASURED_DECODE_STEP_S = 0.02


class PrefixAware(RoutingPolicy):
    """Equal costs go to the one with the fewest tokens to process; those that are equal there too take turns."""

    uses_index = True

    def __init__(self) -> None:
        self._turn = 0

    def choose(
        self, candidates: Sequence[ReplicaLoad], query: RouteQuery, matches: Matches = NO_MATCHES, now: float = 0.0
    ) -> Decision:
        """See RoutingPolicy.choose."""
        allowed = _not_overloaded(candidates)
        totals = [sum(parts) for parts in _estimates(allowed, query, matches, _typical_speeds(candidates))]
        least = min(totals) + SAME_S
        best = [load for load, total in zip(allowed, totals, strict=True) if total <= least]
        if len(best) > 1:
            fewest = min(load.outstanding_tokens for load in best)
            best = [load for load in best if load.outstanding_tokens == fewest]
        self._turn += 1
        return Decision(best[self._turn % len(best)].report.replica_id)

    def costs(
        self, candidates: Sequence[ReplicaLoad], query: RouteQuery, matches: Matches = NO_MATCHES
    ) -> dict[str, Cost]:
        """See RoutingPolicy.costs."""
        estimates = _estimates(candidates, query, matches, _typical_speeds(candidates))
        return {
            load.report.replica_id: Cost(sum(parts), *parts) for load, parts in zip(candidates, estimates, strict=True)
        }


def _typical_speeds(candidates: Sequence[ReplicaLoad]) -> tuple[float, float]:
    """Seconds per prefill token and per decode step that stand in for those a replica has not measured yet."""
    prefill = sorted([s for load in candidates if (s := load.report.prefill_token_s) > 0])
    decode = sorted([s for load in candidates if (s := load.report.decode_step_s) > 0])
    return (
        prefill[len(prefill) // 2] if prefill else UNMEASURED_PREFILL_TOKEN_S,
        decode[len(decode) // 2] if decode else UNMEASURED_DECODE_STEP_S,
    )


def _estimates(
    candidates: Sequence[ReplicaLoad], query: RouteQuery, matches: Matches, typical: tuple[float, float]
) -> list[tuple[float, float, float, float]]:
    """Queue, prefill, decode and eviction seconds of each candidate; one plain loop, since it runs per request."""
    typical_prefill_s, typical_decode_s = typical
    low_prefill_s, high_prefill_s = typical_prefill_s / NOISE, typical_prefill_s * NOISE
    low_decode_s, high_decode_s = typical_decode_s / NOISE, typical_decode_s * NOISE
    num_prompt_tokens, max_tokens = query.num_prompt_tokens, query.max_tokens
    found = []
    for load in candidates:
        report = load.report
        num_blocks, block_size = report.num_blocks or 1, report.block_size
        token_s, step_s = report.prefill_token_s, report.decode_step_s
        token_s = typical_prefill_s if low_prefill_s <= token_s <= high_prefill_s else _believed(token_s, typical[0])
        step_s = typical_decode_s if low_decode_s <= step_s <= high_decode_s else _believed(step_s, typical[1])
        uncached = num_prompt_tokens
        match = matches.get(report.replica_id)
        if match is not None:
            uncached = max(1, num_prompt_tokens - int((match[0] + HOST_CREDIT * match[1]) * block_size))
        prefill_s = uncached * token_s
        kv_share = (report.resident_tokens + load.routed_tokens) / (num_blocks * block_size)
        seat_share = (report.num_running + report.num_waiting + load.routed_requests) / report.max_num_seqs
        fullness = kv_share if kv_share > seat_share else seat_share
        cache_share = load.indexed_blocks / num_blocks
        found.append(
            (
                (report.queued_prefill_tokens + load.routed_prefill_tokens) * token_s,
                prefill_s,
                max_tokens * step_s * DECODE_GROWTH * fullness,
                EVICTION_WEIGHT * prefill_s * (cache_share if cache_share < 1.0 else 1.0),
            )
        )
    return found


def _believed(measured_s: float, typical_s: float) -> float:
    """The seconds to reckon with where a measurement is beyond the noise, or is 0: there is none yet."""
    ratio = measured_s / typical_s
    if measured_s <= 0:
        return typical_s
    if ratio > NOISE:
        return typical_s * min(ratio / NOISE, MOST_UNEQUAL)
    return typical_s * max(ratio * NOISE, 1 / MOST_UNEQUAL)


def _not_overloaded(candidates: Sequence[ReplicaLoad]) -> Sequence[ReplicaLoad]:
    """Those with at most twice the mean number of requests; never empty."""
    if len(candidates) < 2:
        return candidates
    counts = [load.num_requests for load in candidates]
    mean = sum(counts) / len(counts)
    most = max(OVERLOAD * mean, mean + OVERLOAD_SLACK)
    return [load for load, count in zip(candidates, counts, strict=True) if count <= most]
