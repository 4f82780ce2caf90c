"""Segments of a transcript: what was said between two of the times that the model wrote."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

STEP_S = 0.02  # between two times that a model can write


@dataclass(slots=True, frozen=True)
class Segment:
    """Text between two times, in seconds from the sound's beginning."""

    begin_s: float
    end_s: float
    text: str
    token_ids: tuple[int, ...]  # times among them


def segments_of(
    token_ids: Sequence[int],
    first_time: int | None,
    begin_s: float,
    end_s: float,
    decode: Callable[[Sequence[int]], str],
) -> list[Segment]:
    """The segments of a piece that lies between two times, by its tokens; those without text are left out.

    `first_time` is the token that stands for 0.00 s, which those for later times follow; `decode` makes text of the
    others. What stands before the first time begins with the piece, what stands behind the last ends with it.
    """
    found: list[Segment] = []
    opened, held, has_text = begin_s, list[int](), False

    def close(at: float) -> None:
        text = decode([token for token in held if first_time is None or token < first_time])
        if text.strip():
            begin = max(begin_s, min(opened, end_s - STEP_S))
            found.append(Segment(begin, max(min(at, end_s), begin + STEP_S), text, tuple(held)))

    for token in token_ids:
        if first_time is None or token < first_time:
            held.append(token)
            has_text = True
            continue
        at = begin_s + (token - first_time) * STEP_S
        if has_text:
            held.append(token)
            close(at)
        held, has_text = ([] if has_text else [token]), False
        opened = at
    if has_text:
        close(end_s)
    return found
