"""A routing decision with its reasons, for people: what each replica has of a prompt, and what it would cost there."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from app.deployments.routing.load_book import LoadBook
from app.deployments.routing.policies.base import NOTHING, RouteQuery


@dataclass(slots=True, frozen=True)
class ReplicaExplanation:
    """One candidate. Costs are in seconds; None where the policy estimates none."""

    replica_id: str
    is_synced: bool  # the index has all that the replica announced
    device_blocks: int  # leading blocks of the prompt that it has on the device
    host_blocks: int  # further ones in host memory
    cached_tokens: int
    num_running: int
    num_waiting: int
    routed_requests: int  # sent there since its last report
    queued_prefill_tokens: int
    resident_tokens: int
    indexed_blocks: int
    num_blocks: int
    cost_s: dict[str, float] | None = None


@dataclass(slots=True, frozen=True)
class RouteExplanation:
    """`replica_id` is who would be chosen now; None when nobody is known."""

    policy: str
    replica_id: str | None
    level: str | None
    num_prompt_tokens: int
    num_prompt_blocks: int
    replicas: list[ReplicaExplanation] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """Plain dicts and lists."""
        return asdict(self)


def explain(book: LoadBook, query: RouteQuery, policy: str) -> RouteExplanation:
    """Explains what the book would decide now."""
    choice = book.decide(query, explain=True)
    if choice is None:
        return RouteExplanation(policy, None, None, query.num_prompt_tokens, len(query.block_hashes))
    costs = book.costs(query, choice)
    replicas = []
    for load in choice.candidates:
        report = load.report
        match = choice.matches.get(report.replica_id, NOTHING)
        cost = costs.get(report.replica_id)
        replicas.append(
            ReplicaExplanation(
                replica_id=report.replica_id,
                is_synced=book.index is not None and book.index.is_synced(report.replica_id),
                device_blocks=match.device_blocks,
                host_blocks=match.host_blocks,
                cached_tokens=sum(match) * report.block_size,
                num_running=report.num_running,
                num_waiting=report.num_waiting,
                routed_requests=load.routed_requests,
                queued_prefill_tokens=report.queued_prefill_tokens + load.routed_prefill_tokens,
                resident_tokens=report.resident_tokens,
                indexed_blocks=load.indexed_blocks,
                num_blocks=report.num_blocks,
                cost_s=cost._asdict() if cost is not None else None,
            )
        )
    decision = choice.decision
    return RouteExplanation(
        policy, decision.replica_id, decision.level, query.num_prompt_tokens, len(query.block_hashes), replicas
    )
