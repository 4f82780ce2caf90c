"""Holds what a server remembers of one HTTP request, so that its line in the log and its spans can be made at the end.

A few fields for each replica that works on it, none for a token. Times are of `time.monotonic()`, in seconds.
"""

from __future__ import annotations

import re
import secrets
import time
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

MAX_GENERATIONS = 256  # of one HTTP request that are remembered one by one
# A tracestate that is passed on, in characters and in members.
MAX_STATE_CHARS, MAX_MEMBER_CHARS, MAX_MEMBERS = 512, 128, 32

_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")


@dataclass(slots=True, frozen=True)
class EngineTimes:
    """Holds what an engine says of a request at its end, in seconds since it took the request in."""

    scheduled_s: float
    first_token_s: float | None
    last_token_s: float | None
    preempted_s: list[float]


@dataclass(slots=True)
class Leg:
    """One replica's part in a generation."""

    asked_at: float  # when a replica was looked for
    sent_at: float  # when one was chosen
    replica_id: str
    level: str = ""  # what the choice was informed by; empty: the place of the prompt's other choices
    num_hit_tokens: int = 0  # of the prompt, that the Router believed the replica to hold
    num_before: int = 0  # output tokens that earlier replicas brought
    first_at: float | None = None
    ended_at: float | None = None
    queue_s: float = 0.0
    num_cached_tokens: int = 0
    times: EngineTimes | None = None
    left_because: str = ""  # "lost" or "moved", where it was not the last


@dataclass(slots=True)
class GenerationRecord:
    """One request of an engine."""

    model: str
    request_id: str
    num_prompt_tokens: int
    max_tokens: int | None = None
    seed: int | None = None
    legs: list[Leg] = field(default_factory=list)
    num_output_tokens: int = 0
    finish_reason: str = ""
    error: str = ""  # the name of what it ended with


@dataclass(slots=True)
class TraceParent:
    """W3C Trace Context, as a client sent it."""

    trace_id: str
    span_id: str
    flags: int
    state: str = ""

    @classmethod
    def parse(cls, header: str | None, state: str | None) -> TraceParent | None:
        """None where there is none, or one that the standard says to ignore."""
        match = _TRACEPARENT.fullmatch(header) if header and len(header) <= 256 else None
        return None if match is None else cls(match[1], match[2], int(match[3], 16), _whole_members(state or ""))


def _whole_members(state: str) -> str:
    """A tracestate within W3C's bounds: long members go first, then those at its end, none is cut (3.3.1.5)."""
    members = [part for member in state.split(",") if (part := member.strip())]
    if len(",".join(members)) > MAX_STATE_CHARS:
        members = [member for member in members if len(member) <= MAX_MEMBER_CHARS]
    members = members[:MAX_MEMBERS]
    while len(",".join(members)) > MAX_STATE_CHARS:
        members.pop()
    return ",".join(members)


@dataclass(slots=True)
class RequestRecord:
    """One HTTP request."""

    method: str
    path: str
    parent: TraceParent | None = None
    started: float = field(default_factory=time.monotonic)
    started_ns: int = field(default_factory=time.time_ns)
    trace_id: str = ""  # hexadecimal; the client's, or ours where requests are traced
    generations: list[GenerationRecord] = field(default_factory=list)
    request_id: str = ""
    handler: str = ""  # the route
    tenant: str = ""  # its label: see TenantLabels
    status: int = 0
    ended: float = 0.0
    is_broken: bool = False  # the stream ended with an error event

    def begin_trace(self) -> None:
        """Give it a trace id: the client's, or a new one."""
        self.trace_id = self.parent.trace_id if self.parent is not None else secrets.token_hex(16)

    def ns(self, at: float) -> int:
        """A monotonic time as nanoseconds since 1970."""
        return self.started_ns + round((at - self.started) * 1e9)

    def add(self, generation: GenerationRecord) -> None:
        """A request goes to an engine."""
        if len(self.generations) < MAX_GENERATIONS:
            self.generations.append(generation)

    @property
    def num_output_tokens(self) -> int:
        """All that engines brought."""
        return sum(one.num_output_tokens for one in self.generations)

    @property
    def first_at(self) -> float | None:
        """When the first output came."""
        firsts = [leg.first_at for one in self.generations for leg in one.legs if leg.first_at is not None]
        return min(firsts, default=None)

    def log_fields(self) -> dict[str, Any]:
        """Returns what the line in the log says besides, where it is JSON; neither prompts nor answers."""
        legs = [leg for one in self.generations for leg in one.legs]
        fields: dict[str, Any] = {
            "request_id": self.request_id,
            "trace_id": self.trace_id or None,
            "tenant": self.tenant or None,
            "status": self.status,
            "e2e_s": round(self.ended - self.started, 6),
        }
        if self.generations:
            fields |= {
                "model": self.generations[0].model,
                "replica": legs[-1].replica_id if legs else None,
                "attempts": max(len(one.legs) for one in self.generations),
                "prompt_tokens": max(one.num_prompt_tokens for one in self.generations),
                "tokens": self.num_output_tokens,
                "finish_reasons": sorted({one.finish_reason for one in self.generations if one.finish_reason}),
                "ttft_s": None if self.first_at is None else round(self.first_at - self.started, 6),
            }
            if errors := sorted({one.error for one in self.generations if one.error}):
                fields["errors"] = errors
        return fields


CURRENT: ContextVar[RequestRecord | None] = ContextVar("request_record", default=None)
