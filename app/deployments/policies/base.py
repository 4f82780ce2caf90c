"""The seam between the Router and a routing policy: what a policy is told, and what it answers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from app.deployments.wire import LoadReport
from app.engine.request import EngineRequest

EXPECTED_TOKENS = 256


@dataclass(slots=True, frozen=True)
class RouteQuery:
    """The request to be placed."""

    num_prompt_tokens: int
    max_tokens: int  # most that it is expected to generate
    block_hashes: tuple[bytes, ...] = ()  # of the prompt's full blocks, where the ingress computed them

    @classmethod
    def of(cls, request: EngineRequest) -> RouteQuery:
        """Few requests use all of a large `max_tokens`, so no more than EXPECTED_TOKENS of it counts."""
        most = request.sampling_params.max_tokens or EXPECTED_TOKENS
        return cls(len(request.prompt_token_ids), min(most, EXPECTED_TOKENS))

    @classmethod
    def of_prompt(cls, request: EngineRequest) -> RouteQuery:
        """As `of`, for all `n` choices of the request's prompt: they share its KV, each generates its own tokens."""
        query = cls.of(request)
        return cls(query.num_prompt_tokens, query.max_tokens * request.sampling_params.n)

    @property
    def num_tokens(self) -> int:
        """Tokens that the request puts on a replica."""
        return self.num_prompt_tokens + self.max_tokens


@dataclass(slots=True)
class ReplicaLoad:
    """One replica that may be chosen: its last report, and what was routed to it since."""

    report: LoadReport
    routed_tokens: int  # sent there after the report was written

    @property
    def outstanding_tokens(self) -> int:
        """Best guess of the tokens it still has to process."""
        return self.report.outstanding_tokens + self.routed_tokens


class RoutingPolicy(ABC):
    """Chooses a replica. One instance per router process and model; called on one thread."""

    @abstractmethod
    def choose(self, candidates: Sequence[ReplicaLoad], query: RouteQuery) -> ReplicaLoad:
        """One of `candidates` (never empty, in the order of their replica ids)."""
