"""Says where the time of a transcript went: the header Server-Timing, as browsers and clients read it.

`read`, `hear` and `write` follow one another. The others lie within `hear`: `decode` of the file, `language` where it
is found out, and of the pieces, which run side by side, sums: `turns` that they waited for, `features` and `engine`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Timing:
    """The seconds of each part of one request's work."""

    def __init__(self) -> None:
        self._last = time.perf_counter()
        self._seconds: dict[str, float] = {}

    def mark(self, name: str) -> None:
        """Adds what went on since the last mark to this part."""
        last, self._last = self._last, time.perf_counter()
        self._add(name, self._last - last)

    @contextmanager
    def within(self, name: str) -> Iterator[None]:
        """Adds what goes on inside the block to a part."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self._add(name, time.perf_counter() - begin)

    def _add(self, name: str, seconds: float) -> None:
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    def headers(self) -> dict[str, str]:
        """The header; durations in milliseconds."""
        parts = (f"{name};dur={1e3 * seconds:.1f}" for name, seconds in self._seconds.items())
        return {"Server-Timing": ", ".join(parts)}
