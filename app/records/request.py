"""A request as it travels: from who asked, through channel and scheduler, to the workers' rows."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Annotated, TypeVar

from pydantic import Field

from app.records.adapter import AdapterAsk
from app.records.encoder_input import encoder_input_of
from app.records.pooling_params import PoolingParams
from app.records.sampling_params import SamplingParams

Ask = TypeVar("Ask")
CANARY_TENANT = "\0canary"  # no key's tenant: whose requests ask whether an engine answers (no name begins so)
MAX_PRIORITY = (1 << 63) - 1
# A body's field: what a client may ask for.
Priority = Annotated[int, Field(ge=-MAX_PRIORITY - 1, le=MAX_PRIORITY)]


@dataclass(slots=True, frozen=True)
class ServiceClass:
    """Says how urgent a tenant's or a request's work is. Under overload, classes are served in the ratio of their
    shares."""

    name: str = "default"
    share: float = 1.0


DEFAULT_CLASS = ServiceClass()


@dataclass(slots=True, frozen=True)
class Deadline:
    """A request that has not ended, or got its first token, so long after its arrival ends with an error."""

    timeout_s: float
    until_first_token: bool = False  # as who reads a stream waits: for the next piece of it


@dataclass(slots=True, frozen=True)
class Placement:
    """Says whose request it is and what it belongs with: the Router, queues and caches go by it, no worker does."""

    priority: int = 0  # among the tenant's own
    cache_root: bytes = b""  # tenant and cache_salt; see EngineRequest.cache_root
    session: str = ""  # what the client says belongs together; a routing policy may keep it on one replica
    tenant: str = ""  # tenants take turns where work queues
    service_class: ServiceClass = DEFAULT_CLASS
    num_retries: int = 0  # as the client says: it has sent the request so often before
    deadline: Deadline | None = None


ANYWHERE = Placement()


@dataclass(slots=True, frozen=True)
class EngineRequest:
    """Token ids and what to do with them: all an engine needs (I4). One per choice: `n` is expanded by the builder.

    Scheduler and workers refer to this record instead of copying it, so a new field is one line here, and what is one
    feature's alone is none: it travels in `asks`, as a record of the feature's own. What they refer to is `admitted`:
    the tokens have moved to where they grow, and grammar and reasoning into the matcher.
    """

    request_id: str
    prompt_token_ids: list[int]
    work: SamplingParams | PoolingParams  # seed and max_tokens are settled by RequestBounds
    choice_index: int = 0  # which of the request's `n` choices: part of the random key (I6)
    placement: Placement = ANYWHERE
    arrival_time: float = field(default_factory=time.time)  # seconds since the epoch
    asks: tuple[object, ...] = ()  # what it brings for single features: records of their own types, one of each
    # What it generated on a replica that it left. It goes on behind that, as if it had been preempted: all that the
    # params count (max_tokens, min_tokens, penalties, ...) counts these too, and nothing of them is sent again.
    output_token_ids: list[int] = field(default_factory=list)
    settled_by: bytes = field(default=b"", compare=False, repr=False)  # the `RequestBounds.mark` of who settled it

    def asked(self, kind: type[Ask]) -> Ask | None:
        """Returns what it brings for the feature whose record is of this type; None: nothing."""
        for ask in self.asks:
            if isinstance(ask, kind):
                return ask
        return None

    @property
    def cache_root(self) -> bytes:
        """The root of the block-hash chain (I5): tenant, cache_salt, and the digest of its adapter. Who hashes blocks
        takes it from here, so that no request meets blocks of another adapter, whoever built it."""
        ask, root = self.asked(AdapterAsk), self.placement.cache_root
        return root if ask is None else ask.cache_root(root)

    @property
    def token_figures(self) -> list[str]:
        """Returns the names of what each token is to come with: those that records in `asks` have as `token_figures`,
        for which a feature of theirs fills the results of steps."""
        return [name for ask in self.asks for name in getattr(ask, "token_figures", ())]

    @property
    def needs_all_tokens(self) -> bool:
        """True if a record in `asks` has it as `needs_all_tokens`: what its feature makes is made of every token of the
        prompt, and so of no cached one."""
        return any(getattr(ask, "needs_all_tokens", False) for ask in self.asks)

    @property
    def sampling(self) -> SamplingParams:
        """Returns how tokens are chosen, of a request that generates."""
        assert isinstance(self.work, SamplingParams), "a request to a pooling model samples nothing"
        return self.work

    @property
    def pooling(self) -> PoolingParams | None:
        """Returns what is made of the prompt's hidden states, where no tokens are generated."""
        return self.work if isinstance(self.work, PoolingParams) else None

    @property
    def client_token_ids(self) -> list[int]:
        """Returns the tokens of the prompt as it came: the encoder's, where that reads a text. Usage, quotas and
        answers speak of these."""
        read = encoder_input_of(self.asks)
        return self.prompt_token_ids if read is None or read.kind != "text" else read.array().tolist()

    @property
    def num_client_tokens(self) -> int:
        """Number of those."""
        read = encoder_input_of(self.asks)
        return len(self.prompt_token_ids) if read is None or read.kind != "text" else read.length

    @property
    def num_known_tokens(self) -> int:
        """Prompt, and what was generated elsewhere: what the next replica computes first."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def num_prompts(self) -> int:
        """Requests that it stands for: one, unless a record in `asks` has more as `num_prompts` (records/bundle.py)."""
        return max((getattr(ask, "num_prompts", 1) for ask in self.asks), default=1)

    @property
    def num_choices(self) -> int:
        """Requests that the prompt was expanded to."""
        return self.work.n if isinstance(self.work, SamplingParams) else 1

    @property
    def max_tokens(self) -> int | None:
        """Most tokens to generate. A pooling request counts as if it were to draw one, which nobody computes."""
        return self.work.max_tokens if isinstance(self.work, SamplingParams) else 1

    @property
    def wants_logprobs(self) -> bool:
        """True if each token comes with its logprobs."""
        return isinstance(self.work, SamplingParams) and self.work.logprobs is not None

    @property
    def wants_prompt_logprobs(self) -> bool:
        """True if the prompt's tokens come with their logprobs."""
        return isinstance(self.work, SamplingParams) and self.work.prompt_logprobs is not None
