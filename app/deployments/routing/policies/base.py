"""The seam between the Router and a routing policy: what a policy is told, and what it answers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Literal, NamedTuple

from app.deployments.routing.claim import Claim
from app.deployments.routing.prefix_index import PrefixMatch
from app.records.adapter import AdapterAsk
from app.records.load_report import LoadReport
from app.records.request import EngineRequest

EXPECTED_TOKENS = 256

Matches = Mapping[str, PrefixMatch]
NO_MATCHES: Matches = MappingProxyType({})
NOTHING = PrefixMatch(0)

# How well a decision was informed: by the replica's own events; only by what was sent to it lately; by loads alone;
# not by the Router at all, but by power of two in the ingress.
Level = Literal["exact", "speculative", "load", "ingress"]


@dataclass(slots=True, frozen=True)
class RouteQuery:
    """The request to be placed."""

    num_prompt_tokens: int
    max_tokens: int  # most that it is expected to generate
    block_hashes: tuple[bytes, ...] = ()  # the prompt's full blocks, where the ingress computed them
    session: str = ""  # requests of one session, where the client names it
    adapter: str = ""  # digest of the adapter that the request uses, in hex digits
    num_choices: int = 1  # that `max_tokens` is for, together
    num_prompts: int = 1  # that it stands for, each of which takes a row
    num_hashed_tokens: int = 0  # of the one that `block_hashes` are of; 0: of the only one

    @classmethod
    def of(cls, request: EngineRequest) -> RouteQuery:
        """Few requests use all of a large `max_tokens`, so no more than EXPECTED_TOKENS of it counts."""
        generated = len(request.output_token_ids)  # elsewhere: the next replica prefills it with the prompt
        most = (request.max_tokens or EXPECTED_TOKENS + generated) - generated
        ask, session = request.asked(AdapterAsk), request.placement.session
        adapter = "" if ask is None else ask.digest.hex()
        return cls(request.num_known_tokens, min(most, EXPECTED_TOKENS), session=session, adapter=adapter)

    @classmethod
    def of_prompt(cls, request: EngineRequest) -> RouteQuery:
        """The same for all `n` choices of the request's prompt: they share its KV, each generates its own tokens."""
        query = cls.of(request)
        number = request.num_choices
        most = query.max_tokens * number
        return replace(query, max_tokens=most, num_choices=number, num_prompts=request.num_prompts)

    @property
    def num_tokens(self) -> int:
        """Tokens that the request puts on a replica."""
        return self.num_prompt_tokens + self.max_tokens


class Routed(NamedTuple):
    """One request that was sent to a replica."""

    at_s: float
    tokens: int  # prompt and output
    prompt_tokens: int
    prefill_tokens: int  # those of the prompt that it has to compute
    claim: Claim
    num_prompts: int = 1


@dataclass(slots=True)
class ReplicaLoad:
    """One replica that may be chosen: its last report, what was routed to it since, and how full its cache is."""

    report: LoadReport
    routed_tokens: int = 0  # sent there after the report was written, prompt and output
    routed_prefill_tokens: int = 0  # the part of them that it has to prefill
    routed_requests: int = 0
    indexed_blocks: int = 0  # cached blocks that the index knows of
    routed: deque[Routed] = field(default_factory=deque)  # what the three counts are of, oldest first

    @property
    def outstanding_tokens(self) -> int:
        """Best guess of the tokens it still has to process."""
        return self.report.outstanding_tokens + self.routed_tokens

    @property
    def num_requests(self) -> int:
        """Best guess of the requests it has."""
        return self.report.num_running + self.report.num_waiting + self.routed_requests

    @property
    def has_queue(self) -> bool:
        """True if a request that comes now may have to wait for a row."""
        return self.may_have_queue(1)

    def may_have_queue(self, num_senders: int) -> bool:
        """The same where `num_senders` have each sent as much as is known here since the report."""
        report = self.report
        num_requests = report.num_running + report.num_waiting + num_senders * self.routed_requests
        return report.num_waiting > 0 or num_requests >= report.max_num_seqs

    @property
    def fullness(self) -> float:
        """Share of the KV cache or of `max_num_seqs` that is taken, whichever is greater; above 1 where more waits."""
        report = self.report
        kv_tokens = (report.num_blocks or 1) * report.block_size
        kv_share = (report.resident_tokens + self.routed_prefill_tokens) / kv_tokens  # what is cached is there already
        return max(kv_share, self.num_requests / report.max_num_seqs)

    @property
    def cache_share(self) -> float:
        """Returns how much of its KV cache holds blocks that a request may find again; at most 1."""
        return min(1.0, self.indexed_blocks / (self.report.num_blocks or 1))


class Cost(NamedTuple):
    """Says what a request would cost on one replica, in seconds, and of what that consists."""

    total_s: float
    queue_s: float = 0.0  # prefill queued there before it
    prefill_s: float = 0.0  # its own prompt, less what is cached there
    decode_s: float = 0.0  # decode load that it adds
    eviction_s: float = 0.0  # expected recomputing of what its blocks push out
    delay_s: float = 0.0  # what those who come after it wait for its prefill
    adapter_s: float = 0.0  # until its adapter lies on the device


@dataclass(slots=True, frozen=True)
class Decision:
    """Says where a request goes, and how well informed the choice was (filled in by the load book)."""

    replica_id: str
    level: Level = "load"
    match: PrefixMatch = NOTHING  # what the index believes the replica has of the prompt


class RoutingPolicy(ABC):
    """Chooses a replica. One instance per router process and model; called on one thread; reads no clock."""

    uses_index: bool = False  # whether `matches` matter: else the Router does not look them up

    @abstractmethod
    def choose(
        self, candidates: Sequence[ReplicaLoad], query: RouteQuery, matches: Matches = NO_MATCHES, now: float = 0.0
    ) -> Decision:
        """One of `candidates` (never empty, in the order of their replica ids). `now` is in seconds, monotonic."""

    def costs(
        self, candidates: Sequence[ReplicaLoad], query: RouteQuery, matches: Matches = NO_MATCHES
    ) -> dict[str, Cost]:
        """Returns what `choose` would compare, by replica id; empty for a policy that estimates no costs."""
        return {}
