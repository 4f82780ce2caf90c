"""Patterns of names of modules, which a checkpoint's configuration holds: matched within a bound of time, whatever they
are.

They are Python's patterns. `re` has no bound: one of 30 characters can hang a start, and it keeps the interpreter's
lock. `regex` reads the same ones, gives up after a time and lets other threads run.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, field
from math import prod
from typing import Any, Literal

import regex

from app.errors import UnsupportedError

MOST_CHARS = 1 << 12
MOST_REPEATS = 1 << 10  # of all counts in a pattern, multiplied: they are written out when it is compiled
MOST_S = 10.0  # of processor time, for all patterns of a checkpoint; those of a large one take less than 1 s
_PLAIN = re.compile(r"[\w.-]*")  # names themselves, of which there may be one for each module: a dot means a dot


def check_pattern(pattern: str, place: str) -> None:
    """UnsupportedError names a pattern that is none, or too large to be tried."""
    found = re.findall(r"\{(\d*),?(\d*)\}", pattern[:MOST_CHARS])
    counts = [int(count[:9]) for pair in found for count in pair if count]
    if len(pattern) > MOST_CHARS or prod(max(1, count) for count in counts) > MOST_REPEATS:
        what = f"{pattern!r:.80} is longer than {MOST_CHARS} characters, or repeats more than {MOST_REPEATS} times"
        raise UnsupportedError(f"{place}: {what}", param="model")
    try:
        re.compile(pattern)  # which knows none of what `regex` has besides
        regex.compile(pattern)
    except (re.error, regex.error, RecursionError, OverflowError) as error:
        raise UnsupportedError(f"{place}: {pattern!r:.80} is no pattern: {error}", param="model") from None


@dataclass(slots=True)
class PatternTime:
    """The processor time that the patterns of one checkpoint may still take."""

    left_s: float = MOST_S
    _compiled: dict[str, Any] = field(default_factory=dict)  # more than the library keeps

    def begins(self, pattern: str, name: str) -> bool:
        """True if a pattern fits the beginning of a name; UnsupportedError names the one that took too long."""
        return name.startswith(pattern) if _PLAIN.fullmatch(pattern) else self._fits(pattern, name, "match")

    def is_in(self, pattern: str, name: str) -> bool:
        """True if a pattern fits some part of a name; UnsupportedError likewise."""
        return pattern in name if _PLAIN.fullmatch(pattern) else self._fits(pattern, name, "search")

    def _fits(self, pattern: str, name: str, way: Literal["match", "search"]) -> bool:
        if pattern not in self._compiled:
            self._compiled[pattern] = regex.compile(pattern)
        began = time.thread_time()
        try:
            found = getattr(self._compiled[pattern], way)(name, timeout=max(self.left_s, 1e-3), concurrent=True)
        except TimeoutError:
            what = f"{pattern!r:.80} takes more than {MOST_S:g} s to be tried on names such as {name}"
            raise UnsupportedError(f"quantization_config: {what}", param="model") from None
        self.left_s -= time.thread_time() - began
        return found is not None
