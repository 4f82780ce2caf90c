"""Stop strings over a stream of text (invariant I4): found across token boundaries, never leaked in part.

The earliest match wins; a match counts only when a token after `min_tokens` completes it. Text that might be the
beginning of a stop string is held back until that is decided.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Watches one output's text. `feed` returns what may be shown; `found` is the stop string once there is one."""

    def __init__(self, stop: Sequence[str], include_in_output: bool = False) -> None:
        self._stop = tuple(stop)
        self._include = include_in_output
        self._longest = max((len(text) for text in self._stop), default=0)
        self._tail = ""  # the last characters seen: the end may begin a stop string
        self._num_shown = 0  # characters of `_tail` that have been shown
        self.found: str | None = None

    def feed(self, text: str, countable: bool = True) -> str:
        """Take new text and return what is now certain to be shown.

        `countable` is False for text of the first `min_tokens` tokens, which cannot complete a match.
        """
        assert self.found is None, "text after the stop"
        num_old = len(self._tail)
        self._tail += text
        if countable and text:
            match = self._first_match(num_old)
            if match is not None:
                start, self.found = match
                end = start + len(self.found) if self._include else start
                return self._tail[self._num_shown : end]
        return self._show(len(self._tail) - self._num_held())

    def flush(self) -> str:
        """The text held back, when the output ended without a stop string."""
        return self._show(len(self._tail))

    def _first_match(self, num_old: int) -> tuple[int, str] | None:
        """(start, stop string) of the earliest match that ends in the new text."""
        best: tuple[int, str] | None = None
        for text in self._stop:
            start = self._tail.find(text, max(0, num_old - len(text) + 1))
            if start >= 0 and (best is None or start < best[0]):
                best = (start, text)
        return best

    def _num_held(self) -> int:
        """Length of the longest end of the text that a stop string begins with; 0 where stops are shown anyway."""
        if self._include:
            return 0
        return max(_overlap(self._tail, text) for text in self._stop)

    def _show(self, end: int) -> str:
        shown = self._tail[self._num_shown : end]
        cut = max(0, min(end, len(self._tail) - self._longest + 1))  # what no match can reach any more
        self._tail = self._tail[cut:]
        self._num_shown = end - cut
        return shown


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning of `stop`, short of the whole."""
    start = text.find(stop[0], max(0, len(text) - len(stop) + 1))
    while start >= 0 and not stop.startswith(text[start:]):
        start = text.find(stop[0], start + 1)
    return len(text) - start if start >= 0 else 0
