"""Holds the rules by which a transcriber's tokens are chosen: which never come, and where times stand between texts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True, frozen=True)
class TimeRules:
    """Times are the tokens from `first` on. A text stands between two, which never go back."""

    first: int
    end: int  # of the transcript: tokens before it are texts
    latest_begin: int | None = None  # the latest time to begin with; None: any
    never: tuple[int, ...] = ()  # tokens that say something else of times


@dataclass(slots=True, frozen=True)
class TranscriptionRules:
    """Holds what a request for a transcript brings for its logits."""

    suppressed: tuple[int, ...] = ()
    suppressed_first: tuple[int, ...] = ()  # as the first token
    times: TimeRules | None = None  # None: the transcript has none
