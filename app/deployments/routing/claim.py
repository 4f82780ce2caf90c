"""Holds what a request asks of admission, and what it may be told instead of a replica."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from app.records.request import DEFAULT_CLASS, ServiceClass


class Claim(NamedTuple):
    """Says whose request it is, and until when it has to be served."""

    service_class: ServiceClass = DEFAULT_CLASS
    tenant: str = ""
    time_left_s: float | None = None  # until its deadline
    until_first_token: bool = False  # what the deadline is for; else the end
    is_retry: bool = False  # the client has sent it before, or a replica has had it
    num_choices: int = 1  # of the prompt, which go to one replica
    num_prompts: int = 1  # that it stands for (records/bundle.py)
    may_wait: bool = False  # rather than be refused: it has been taken in already


NO_CLAIM = Claim()


@dataclass(slots=True, frozen=True)
class Wait:
    """Ask again after so many seconds: retries are let in at a rate."""

    wait_s: float


@dataclass(slots=True, frozen=True)
class Rejection:
    """The request cannot be served in time: because of what its tenant has waiting, of what all have, or as one retry
    too many."""

    reason: Literal["tenant", "server", "retry"]
    wait_s: float  # until its turn would come
    retry_after_s: float
