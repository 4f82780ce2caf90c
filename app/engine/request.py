"""A request as it travels (EngineRequest) and as the scheduler keeps it (Request)."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from enum import Enum
from typing import Annotated

from pydantic import Field

from app.engine.pooling.params import PoolingParams
from app.engine.sampling_params import SamplingParams
from app.engine.step import TokenLogprobs
from app.engine.structured.matcher import Matcher
from app.engine.structured.reasoning import ReasoningSpan
from app.engine.thinking_budget import ThinkingBudget

MAX_PRIORITY = (1 << 63) - 1
# A body's field: what a client may ask for.
Priority = Annotated[int, Field(ge=-MAX_PRIORITY - 1, le=MAX_PRIORITY)]


@dataclass(slots=True, frozen=True)
class EngineRequest:
    """Token ids and sampling parameters: all an engine needs (I4). One per choice: `n` is expanded by the API layer."""

    request_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams  # seed drawn, max_tokens set by the API layer
    choice_index: int = 0
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    priority: int = 0
    cache_root: bytes = b""  # tenant, adapter and cache_salt: root of the block-hash chain (I5)
    arrival_time: float = field(default_factory=time.time)  # seconds since the epoch
    tenant: str = ""  # whose request it is; tenants take turns where work queues
    reasoning: ReasoningSpan | None = None  # before a structured output; None: that begins at once
    pooling_params: PoolingParams | None = None  # for a vector instead of tokens; sampling_params are NO_SAMPLING
    thinking_budget: ThinkingBudget | None = None  # the params' thinking_token_budget, in the model's tokens


class RequestStatus(Enum):
    """Where a request is in the scheduler."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Request:
    """The scheduler's record of a request. Counts that change with every step live in RowTable while it runs.

    Times are of `time.monotonic()`, in seconds; `arrival` is when the API layer took the request in.
    """

    request_id: str
    sampling_params: SamplingParams  # seed and max_tokens set
    token_ids: list[int]  # prompt, then every output token that has come back
    num_prompt_tokens: int
    max_total_tokens: int  # prompt + max_tokens, within the context
    eos_token_ids: tuple[int, ...]
    stop_token_ids: frozenset[int]
    root_hash: bytes
    choice_index: int = 0
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    priority: int = 0
    arrival: float = 0.0

    pooling_params: PoolingParams | None = None
    thinking_budget: ThinkingBudget | None = None
    needs_all_tokens: bool = False  # its result is made of the hidden states of every token of the prompt
    matcher: Matcher | None = None  # where its output stands in its grammar; None: it has none
    key: tuple[int, int] = (0, 0)  # place in the order of service: smaller goes first; set by Scheduler.add
    status: RequestStatus = RequestStatus.WAITING
    paused: bool = False
    row: int = -1  # -1 while it has none
    load_step: int = 0  # the step message that loads blocks it holds: until its return they may be written
    is_loading: bool = False  # has a row, but waits for those blocks
    resume_after_step: int = 0  # step messages up to this one must return before it may enter a row again

    block_ids: list[int] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)  # the full blocks' of known tokens, as far as made
    num_published_blocks: int = 0  # leading blocks that are findable by hash

    num_cached_tokens: int = 0
    num_preemptions: int = 0
    prompt_logprobs: list[TokenLogprobs | None] | None = None  # collected chunk by chunk, until delivered
    prompt_logprobs_delivered: bool = False

    queued: float = 0.0  # when the engine took it in
    first_scheduled: float | None = None
    first_token: float | None = None
    last_token: float | None = None

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
        if self.needs_all_tokens:
            return True
        return self.sampling_params.prompt_logprobs is not None and not self.prompt_logprobs_delivered

    @property
    def is_finished(self) -> bool:
        """Whether the final output has been made."""
        return self.status is RequestStatus.FINISHED
