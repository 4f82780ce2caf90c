"""A request as the scheduler keeps it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from app.records.request import CANARY_TENANT, EngineRequest
from app.records.step import TokenLogprobs
from app.structured.matcher import Matcher
from app.telemetry.request_record import EngineTimes


class RequestStatus(Enum):
    """Says where a request is in the scheduler."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


class Ranks(Protocol):
    """Says the rank of each of some requests, which changes with who is among them."""

    def add(self, request: Request) -> None:
        """A request is one of them."""

    def rank(self, request: Request) -> int:
        """The rank of one of them."""


@dataclass(slots=True, eq=False)
class Request:
    """Holds what changes about a request, beside its `spec`, which does not. Counts that change with every step live in
    RowTable while it runs.

    Times are of `time.monotonic()`, in seconds; `arrival` is when the API layer took the request in.
    """

    spec: EngineRequest  # as admitted: without its tokens and its grammar's text
    token_ids: list[int]  # prompt, then every output token that has come back
    num_prompt_tokens: int
    max_total_tokens: int  # prompt + max_tokens, within the context
    eos_token_ids: tuple[int, ...]
    stop_token_ids: frozenset[int]
    root_hash: bytes
    revision: str = ""  # of the weights, in root_hash
    arrival: float = 0.0

    needs_all_tokens: bool = False  # its result is made of the hidden states of every token of the prompt
    matcher: Matcher | None = None  # where its output stands in its grammar; None: it has none
    number: int = 0  # of those that came before it
    key: int = 0  # its rank, unless `ranks` says it
    ranks: Ranks | None = None  # where its priority counts
    cost: float = 0.0  # tokens that it was expected to take when it began to wait: what its tenant is charged
    is_charged: bool = False
    status: RequestStatus = RequestStatus.WAITING
    paused: bool = False
    row: int = -1  # -1 while it has none
    load_step: int = 0  # the step message that loads blocks it holds: until its return they may be written
    is_loading: bool = False  # has a row, but waits for those blocks
    resume_after_step: int = 0  # step messages up to this one must return before it may enter a row again

    block_ids: list[int] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)  # of the full blocks of known tokens hashed so far
    num_published_blocks: int = 0  # leading blocks that are findable by hash

    num_resumed_tokens: int = 0  # output that was generated, delivered and counted on another replica
    num_cached_tokens: int = 0
    num_loaded_tokens: int = 0  # those of them that the connector brought back
    num_right_drafts: int = 0
    num_wrong_drafts: int = 0
    num_preemptions: int = 0
    preempted_at: list[float] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] | None = None  # collected chunk by chunk, until delivered
    owes_prompt_logprobs: bool = False  # they are wanted, and have not been delivered

    queued: float = 0.0  # when the engine took it in
    first_scheduled: float | None = None
    first_token: float | None = None
    last_token: float | None = None

    @property
    def tenant(self) -> str:
        """The tenant that it belongs to."""
        return self.spec.placement.tenant

    @property
    def rank(self) -> int:
        """Its rank among running requests, and its place among the tenant's own: smaller goes first. Unique."""
        return self.key if self.ranks is None else self.ranks.rank(self)

    @property
    def request_id(self) -> str:
        """Unique in the engine."""
        return self.spec.request_id

    @property
    def times(self) -> EngineTimes | None:
        """Returns what became of it, in seconds since the engine took it in; None before it was scheduled."""
        if self.first_scheduled is None:
            return None
        first, last = self.first_token, self.last_token
        return EngineTimes(
            self.first_scheduled - self.queued,
            None if first is None else first - self.queued,
            None if last is None else last - self.queued,
            [at - self.queued for at in self.preempted_at],
        )

    @property
    def num_tokens(self) -> int:
        """Known tokens: prompt and output."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Output tokens that have come back."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        """Output tokens that have come back, as a new list."""
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def skips_cache_read(self) -> bool:
        """Prompt logprobs and most poolings need every prompt token computed: cached blocks are of no use to them until
        those are delivered."""
        return self.needs_all_tokens or self.owes_prompt_logprobs

    @property
    def is_canary(self) -> bool:
        """True if the server asks itself, so that nobody's metrics count it."""
        return self.spec.placement.tenant == CANARY_TENANT

    @property
    def is_returning(self) -> bool:
        """True if it has been cut off, here or on another replica, and so goes ahead of the queue."""
        return self.status is RequestStatus.PREEMPTED or self.num_resumed_tokens > 0

    @property
    def is_finished(self) -> bool:
        """True if the final output has been made."""
        return self.status is RequestStatus.FINISHED
