"""Holds what the engine measures about itself: a snapshot for the load book, timings for the metrics.

The engine thread writes, other threads read: every field read from outside is one Python object that is replaced or
incremented, so a snapshot may mix two neighbouring steps but is never torn. Times are in seconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from app.records.adapter import NO_ADAPTERS, AdapterState
from app.records.outputs import FinishReason
from app.records.request import EngineRequest
from app.records.request_state import Request

EWMA_WEIGHT = 0.1  # the newest sample's: about the last twenty steps count
TYPICAL_OUTPUT_TOKENS = 128.0  # expected length of an answer before any has ended


class QueuedWork(NamedTuple):
    """Says what waits of one tenant in one class, in seconds of the engine's work."""

    service_class: str
    share: float
    tenant: str
    work_s: float
    rate: float = 0.0  # seconds of it that begin in a second; until measured, what it may count on; 0 unknown


@dataclass(slots=True, frozen=True)
class EngineStats:
    """The state of one engine at a moment: what routing, scaling and control decide on, and its figures."""

    num_running: int  # requests in a row, paused ones included
    num_waiting: int  # requests without a row: new and preempted ones
    num_paused: int  # held for a slow client, running or waiting
    num_deferred: int  # those of them that wait
    num_blocks: int
    num_free_blocks: int  # cached blocks that nobody holds are free
    num_cached_blocks: int  # findable by hash
    outstanding_prefill_tokens: int  # known tokens still to compute
    outstanding_decode_tokens: int  # estimate of output tokens still to come
    steps_total: int
    prefill_token_s: float  # average time per prefill token
    decode_step_s: float  # average time of a step that only decodes
    prefill_s_total: float  # seconds of steps spent on prefills
    queued: tuple[QueuedWork, ...] = ()  # those of most work
    begun_rate: float = 0.0  # seconds of queued work that begin in a second; 0 until measured
    sleep_level: int = 0  # 0: awake; 1: weights in host memory; 2: weights dropped
    held: str = ""  # why new requests wait; empty where they do not
    refusal: str | None = None  # why requests are refused: asleep, or without weights
    model_revision: str = ""  # of the weights that answer
    adapters: AdapterState = NO_ADAPTERS
    figures: Mapping[str, float] = field(default_factory=dict)  # for METRICS alone; totals from the engine's start

    @property
    def num_adapters(self) -> int:
        """Adapters that requests may name."""
        return len(self.adapters.known)

    @property
    def num_undeferred(self) -> int:
        """Requests that wait for rows or blocks."""
        return self.num_waiting - self.num_deferred

    @property
    def kv_cache_usage(self) -> float:
        """Share of the blocks that requests hold, 0 to 1."""
        return 1.0 - self.num_free_blocks / self.num_blocks

    @property
    def outstanding_tokens(self) -> int:
        """Work left, in tokens: what the router balances."""
        return self.outstanding_prefill_tokens + self.outstanding_decode_tokens

    @property
    def queued_prefill_s(self) -> float:
        """Seconds of prefill left to do; 0 until the cost of a token is measured."""
        return self.outstanding_prefill_tokens * self.prefill_token_s


@dataclass(slots=True, frozen=True)
class RequestTimings:
    """One finished request, for the histograms. A duration is None when the request did not get so far."""

    spec: EngineRequest
    finish_reason: FinishReason
    num_prompt_tokens: int
    num_generation_tokens: int
    num_cached_tokens: int
    num_preemptions: int
    num_resumed_tokens: int  # output tokens that another replica generated and counted
    max_tokens: int
    e2e_s: float  # arrival at the API layer to the end
    ttft_s: float | None  # arrival at the API layer to the first token
    queue_s: float | None  # arrival at the engine to the first step
    prefill_s: float | None  # first step to first token
    decode_s: float | None  # first to last token
    inference_s: float | None  # first step to last token

    @property
    def num_own_tokens(self) -> int:
        """Tokens that were generated here."""
        return self.num_generation_tokens - self.num_resumed_tokens

    @property
    def num_computed_prompt_tokens(self) -> int | None:
        """Prompt tokens that no cache held; None: another replica counted them."""
        return None if self.num_resumed_tokens else self.num_prompt_tokens - self.num_cached_tokens

    @property
    def num_choices(self) -> int | None:
        """The request's `n`; None: another of its choices tells it."""
        return None if self.spec.choice_index else self.spec.num_choices

    @property
    def per_token_s(self) -> float | None:
        """Mean time of a token after the first."""
        own = self.num_own_tokens
        return self.decode_s / (own - 1) if own > 1 and self.decode_s is not None else None

    @classmethod
    def of(cls, request: Request, reason: FinishReason, now: float) -> RequestTimings:
        """Timings of a request that ends at `now` (monotonic)."""
        started, first, last = request.first_scheduled, request.first_token, request.last_token
        return cls(
            spec=request.spec,
            finish_reason=reason,
            num_prompt_tokens=request.num_prompt_tokens,
            num_generation_tokens=request.num_output_tokens,
            num_cached_tokens=request.num_cached_tokens,
            num_preemptions=request.num_preemptions,
            num_resumed_tokens=request.num_resumed_tokens,
            max_tokens=request.max_total_tokens - request.num_prompt_tokens,
            e2e_s=now - request.arrival,
            ttft_s=None if first is None or request.num_resumed_tokens else first - request.arrival,
            queue_s=None if started is None else started - request.queued,
            prefill_s=None if first is None or started is None else first - started,
            decode_s=None if first is None or last is None else last - first,
            inference_s=None if last is None or started is None else last - started,
        )


@dataclass(slots=True)
class StepStats:
    """Holds what one step brought, handed to the recorder once the step's tokens are known."""

    num_tokens: int  # computed in the step
    num_generation_tokens: int
    num_running: int
    num_waiting: int
    step_time_s: float  # as the worker saw it
    tokens_s: float = 0.0  # of it for its tokens
    num_prompt_tokens: int = 0  # of prompts that were completed in the step
    num_cached_tokens: int = 0  # those of them that were not computed
    num_loaded_tokens: int = 0  # those of the latter that the connector brought back
    ttft_s: list[float] = field(default_factory=list)  # one for each request that got its first token
    itl_s: NDArray[np.float64] = field(default_factory=lambda: np.empty(0))  # since each other request's last token
    measured: Mapping[str, Sequence[float]] = field(default_factory=dict)  # more of what METRICS reads, by name

    def add_prompt(self, request: Request) -> None:
        """Count the prompt of a request, which the step completed."""
        self.num_prompt_tokens += request.num_prompt_tokens
        self.num_cached_tokens += request.num_cached_tokens
        self.num_loaded_tokens += request.num_loaded_tokens


class StatsRecorder(Protocol):
    """Feeds histograms; called on the engine thread, so it must be quick."""

    def record_step(self, step: StepStats) -> None:
        """Take note of one step whose output has come back."""

    def record_finished(self, timings: RequestTimings) -> None:
        """Record the end of a request."""

    def record_phases(self, schedule_s: float, wait_s: float, update_s: float) -> None:
        """Record what a turn of the engine's loop took: writing step messages, waiting for workers, taking outputs."""


@dataclass(slots=True)
class StepCosts:
    """Moving averages of what a prefill token and a decode step cost, in seconds; 0 until measured.

    A prefill token costs average seconds over average tokens, so that long prefills count for more: the rest of a
    cached prompt, a few tokens in a whole step, says nothing about the cost of a token.
    """

    decode_step_s: float = 0.0
    prefill_token_s: float = 0.0
    prefill_s_total: float = 0.0  # a sum, unlike the rest
    _prefill_s: float = 0.0
    _prefill_tokens: float = 0.0

    def observe(self, num_prefill_tokens: int, num_decodes: int, step_time_s: float) -> None:
        """Account one step: a mixed one costs a decode step plus its prefill tokens."""
        if step_time_s <= 0:
            return
        if num_prefill_tokens == 0:
            if num_decodes:
                self.decode_step_s = _ewma(self.decode_step_s, step_time_s)
            return
        prefill_s = step_time_s - (self.decode_step_s if num_decodes else 0.0)
        if prefill_s > 0:
            self.prefill_s_total += prefill_s
            self._prefill_s = _ewma(self._prefill_s, prefill_s)
            self._prefill_tokens = _ewma(self._prefill_tokens, num_prefill_tokens)
            self.prefill_token_s = self._prefill_s / self._prefill_tokens


@dataclass(slots=True)
class OutputLengths:
    """The moving average of how long answers are."""

    average: float = TYPICAL_OUTPUT_TOKENS

    def observe(self, reason: FinishReason, num_output_tokens: int) -> None:
        """A request ended; what was cut short says nothing about the length of answers."""
        if reason in ("stop", "length"):
            self.average += EWMA_WEIGHT * (num_output_tokens - self.average)


def _ewma(average: float, sample: float) -> float:
    return sample if average == 0.0 else average + EWMA_WEIGHT * (sample - average)
