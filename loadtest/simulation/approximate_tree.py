"""What routers do that hear nothing of the caches: they remember what they sent where, and guess the rest.

The usual rules (see SGLang's cache-aware router): the longest remembered match takes a request if it covers more than
a threshold of the prompt, otherwise the least loaded replica does; with loads far apart, the least loaded one always.
The memory of each replica is an LRU of as many blocks as its cache has.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from app.deployments.routing.policies.base import NO_MATCHES, Decision, Matches, ReplicaLoad, RouteQuery, RoutingPolicy

MATCH_THRESHOLD = 0.3
IMBALANCE_ABSOLUTE = 64  # requests between the most and the least loaded replica
IMBALANCE_RELATIVE = 1.5


class ApproximateTree(RoutingPolicy):
    """A chain hash stands for a node of the tree: it names the block and all before it."""

    def __init__(self) -> None:
        self._sent: dict[str, OrderedDict[bytes, None]] = {}
        self._holders: dict[bytes, set[str]] = {}

    def choose(
        self, candidates: Sequence[ReplicaLoad], query: RouteQuery, matches: Matches = NO_MATCHES, now: float = 0.0
    ) -> Decision:
        """See RoutingPolicy.choose."""
        counts = [load.num_requests for load in candidates]
        most, least = max(counts), min(counts)
        fewest = candidates[counts.index(least)]
        chosen = fewest
        if not (most - least > IMBALANCE_ABSOLUTE and most > IMBALANCE_RELATIVE * least):
            depth, names = self._longest(query.block_hashes)
            known = [load for load in candidates if load.report.replica_id in names]
            if known and depth * fewest.report.block_size > MATCH_THRESHOLD * query.num_prompt_tokens:
                chosen = min(known, key=lambda load: load.num_requests)
        self._remember(chosen, query.block_hashes)
        return Decision(chosen.report.replica_id)

    def _longest(self, block_hashes: Sequence[bytes]) -> tuple[int, set[str]]:
        for depth in range(len(block_hashes), 0, -1):
            if names := self._holders.get(block_hashes[depth - 1]):
                return depth, names
        return 0, set()

    def _remember(self, load: ReplicaLoad, block_hashes: Sequence[bytes]) -> None:
        name = load.report.replica_id
        sent = self._sent.setdefault(name, OrderedDict())
        for block_hash in reversed(block_hashes):  # a leaf goes before its parents
            if block_hash in sent:
                sent.move_to_end(block_hash)
            else:
                sent[block_hash] = None
                self._holders.setdefault(block_hash, set()).add(name)
        while len(sent) > load.report.num_blocks:
            block_hash, _ = sent.popitem(last=False)
            holders = self._holders[block_hash]
            holders.discard(name)
            if not holders:
                del self._holders[block_hash]
