"""Sends a request where it costs least: seconds of prefill before its first token, plus the decode load that it adds.

    queue    prefill tokens queued there x seconds per prefill token
    prefill  tokens of the prompt that are not cached there x seconds per prefill token; tokens in host memory count
             as a quarter of computed ones, since they come back by a copy
    delay    half of that again, for those who come after it and wait until it is done; shared by the replicas that hold
             as much of the prompt: what several hold is asked for often, and one more copy will serve others
    decode   expected output tokens x seconds per decode step x a tenth of how full the replica is: the part of a
             decode step that grows with the batch, for as long as the request decodes
    adapter  seconds until the request's adapter lies on the device: none where rows compute with it; a copy where a
             slot is free; where none is, half of the output of those who have one, too
    eviction its new blocks push out as many others where the cache is full; half of them are expected back

Seconds are measured by the replicas, and told in heartbeats. They are noisy, and a replica that looks slow gets few
requests to show that it no longer is; so up to a factor of two from the median counts as equal, and of more than that
only what is beyond. What was routed after the last report is added. A hot prefix spreads by itself: once the queue at
its home costs more than a second prefill elsewhere, elsewhere is cheaper. Beside that, a replica is passed over while
it has more than twice the mean number of requests, and more above the mean than a quarter of `max_num_seqs`: the decode
load is an estimate, this is a bound. (It is none for a group of siblings: those of an agent come four to eight at a
time, to a replica that has few others, and would lose their prefix.)

The shape of the cost (uncached prefill plus decode load, both in one unit) follows NVIDIA Dynamo's router.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from app.deployments.routing.policies.base import (
    EXPECTED_TOKENS,
    NO_MATCHES,
    Cost,
    Decision,
    Matches,
    ReplicaLoad,
    RouteQuery,
    RoutingPolicy,
)
from app.deployments.routing.policies.load_table import FloatArray, LoadTable

HOST_CREDIT = 0.75  # what a block in host memory counts, against one on the device
DELAY_WEIGHT = 0.5  # of a prefill, for what others wait; 1 piles prefixes up on few of 64 replicas
AS_MUCH = 0.9  # of the longest match
EVICTION_WEIGHT = 0.5  # share of evicted blocks that somebody asks for again; tuned with loadtest.simulate
DECODE_GROWTH = 0.1  # how much longer a decode step takes at a full cache; more tears prefixes apart (docs/routing.md)
NOISE = 2.0  # times slower or faster than the median that a replica may seem by chance
MOST_UNEQUAL = 4.0  # times slower or faster than the median that a replica may count as
OVERLOAD = 2.0  # times the mean number of requests
OVERLOAD_SHARE = 0.25  # of `max_num_seqs`: so many requests above the mean are never an overload ...
OVERLOAD_SLACK = 4  # ... nor are so many
ADAPTER_LOAD_S = 0.003  # from host memory into a slot, of rank 16 and 8 billion weights
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
        table = LoadTable.of(candidates)
        totals = _estimates(table, query, matches).sum(axis=0)
        totals[_overloaded(table)] = np.inf
        best = np.flatnonzero(totals <= totals.min() + SAME_S)
        if len(best) > 1:
            outstanding = table.outstanding_tokens[best]
            best = best[outstanding == outstanding.min()]
        self._turn += 1
        return Decision(table[int(best[self._turn % len(best)])].report.replica_id)

    def costs(
        self, candidates: Sequence[ReplicaLoad], query: RouteQuery, matches: Matches = NO_MATCHES
    ) -> dict[str, Cost]:
        """See RoutingPolicy.costs."""
        parts = _estimates(LoadTable.of(candidates), query, matches).T.tolist()
        return {load.report.replica_id: Cost(sum(own), *own) for load, own in zip(candidates, parts, strict=True)}


def _estimates(table: LoadTable, query: RouteQuery, matches: Matches) -> FloatArray:
    """Queue, prefill, decode, eviction, delay and adapter seconds of each replica: [6, R]."""
    token_s = _believed(table.prefill_token_s, UNMEASURED_PREFILL_TOKEN_S)
    step_s = _believed(table.decode_step_s, UNMEASURED_DECODE_STEP_S)
    parts = np.empty((6, len(table)))
    queue_s, prefill_s, decode_s, eviction_s, delay_s, adapter_s = parts
    adapter_s[:] = _adapter_s(table, query, step_s) if query.adapter else 0.0
    np.multiply(table.queued_prefill_tokens, token_s, out=queue_s)
    cached = _cached_tokens(table, matches)
    np.multiply(query.num_prompt_tokens - cached, token_s, out=prefill_s)
    np.maximum(prefill_s, token_s, out=prefill_s)  # the last token is always computed
    np.multiply(table.fullness, (query.max_tokens * DECODE_GROWTH) * step_s, out=decode_s)
    np.multiply(table.cache_share, EVICTION_WEIGHT * prefill_s, out=eviction_s)
    num_holders = np.count_nonzero(cached >= AS_MUCH * cached.max()) if cached.any() else 1
    np.multiply(prefill_s, DELAY_WEIGHT / num_holders, out=delay_s)
    return parts


def _adapter_s(table: LoadTable, query: RouteQuery, step_s: FloatArray) -> list[float]:
    """Seconds until the request's adapter lies on each replica's device; slots are left one after another."""
    found = []
    for load, own_step_s in zip(table, step_s.tolist(), strict=True):
        adapters = load.report.adapters
        wait_s = 0.0 if query.adapter in adapters.running else ADAPTER_LOAD_S
        wait_s += adapters.read_s if query.adapter in adapters.on_disk else 0.0
        if wait_s and len(adapters.running) >= adapters.num_slots:
            wait_s += EXPECTED_TOKENS / 2 * own_step_s / max(1, adapters.num_slots)
        found.append(wait_s)
    return found


def _cached_tokens(table: LoadTable, matches: Matches) -> FloatArray:
    """Tokens of the prompt that need not be computed on each replica; those in host memory count in part."""
    blocks = np.zeros(len(table))
    position = table.position
    for name, (device_blocks, host_blocks) in matches.items():
        if (at := position.get(name)) is not None:
            blocks[at] = device_blocks + HOST_CREDIT * host_blocks
    cached: FloatArray = blocks * table.block_size
    return cached


def _believed(measured_s: FloatArray, unmeasured_s: float) -> FloatArray:
    """The seconds to reckon with: those of the median replica, but for what is beyond the noise. A replica without a
    measurement (0) is taken for the median; `unmeasured_s` is that where nobody has one."""
    known = measured_s[measured_s > 0]
    if not len(known):
        return np.full(len(measured_s), unmeasured_s)
    known.sort()
    typical_s = known[len(known) // 2]
    ratio = np.where(measured_s > 0, measured_s / typical_s, 1.0)
    ratio /= np.minimum(np.maximum(ratio, 1 / NOISE), NOISE)
    believed: FloatArray = typical_s * np.minimum(np.maximum(ratio, 1 / MOST_UNEQUAL), MOST_UNEQUAL)
    return believed


def _overloaded(table: LoadTable) -> NDArray[np.bool_]:
    """Those with more than twice the mean number of requests, and many for their `max_num_seqs`; never all."""
    mean = table.num_requests.mean()
    slack = np.maximum(OVERLOAD_SHARE * table.max_num_seqs, OVERLOAD_SLACK)
    found: NDArray[np.bool_] = table.num_requests > np.maximum(OVERLOAD * mean, mean + slack)
    return found
