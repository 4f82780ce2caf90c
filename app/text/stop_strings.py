"""Stop strings over a stream of text (invariant I4): found across token boundaries, never leaked in part.

The earliest match wins; a match counts only when a token after `min_tokens` completes it. Text that might be the
beginning of a stop string is held back until that is decided. Each character is looked at about once for each stop
string, whatever their lengths (Knuth, Morris and Pratt, 1977).
"""

from __future__ import annotations

from collections.abc import Sequence


class _Watch:
    """Tracks how much of the beginning of one stop string the text so far ends with, short of the whole: `length`."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.length = 0
        self._borders = [0, 0]  # longest border of each prefix of `stop`, by its length, as far as needed

    def feed(self, text: str) -> int | None:
        """The index in `text` behind the first match that ends in it, None without one."""
        stop, length, i, found = self.stop, self.length, 0, None
        while i < len(text):
            if not length:
                i = text.find(stop[0], i)
                if i < 0:
                    break
            while length and stop[length] != text[i]:
                length = self._border(length)
            length += stop[length] == text[i]
            i += 1
            if length == len(stop):
                found = i if found is None else found
                length = self._border(length)
        self.length = length
        return found

    def _border(self, length: int) -> int:
        """Length of the longest beginning of the stop string, short of `length`, that its first `length` characters end
        with."""
        while len(self._borders) <= length:
            end = len(self._borders) - 1
            border = self._borders[end]
            while border and self.stop[border] != self.stop[end]:
                border = self._borders[border]
            self._borders.append(border + (self.stop[border] == self.stop[end]))
        return self._borders[length]


class StopStrings:
    """Watches one output's text. `feed` returns what may be shown; `found` is the stop string once there is one."""

    def __init__(self, stop: Sequence[str], include_in_output: bool = False) -> None:
        self._watches = [_Watch(text) for text in stop]
        self._include = include_in_output
        self._longest = max(map(len, stop), default=0)
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
        if text:
            match = self._first_match(text, num_old)
            if match is not None and countable:
                start, self.found = match
                end = start + len(self.found) if self._include else start
                return self._tail[self._num_shown : end]
        return self._show(len(self._tail) - self._num_held())

    def flush(self) -> str:
        """The text held back, when the output ended without a stop string."""
        return self._show(len(self._tail))

    def _first_match(self, text: str, num_old: int) -> tuple[int, str] | None:
        """(start, stop string) of the earliest match that ends in the new text."""
        best: tuple[int, str] | None = None
        for watch in self._watches:
            end = watch.feed(text)
            if end is not None and (best is None or num_old + end - len(watch.stop) < best[0]):
                best = (num_old + end - len(watch.stop), watch.stop)
        return best

    def _num_held(self) -> int:
        """Length of the longest end of the text that a stop string begins with; 0 where stops are shown anyway."""
        return 0 if self._include else max(watch.length for watch in self._watches)

    def _show(self, end: int) -> str:
        shown = self._tail[self._num_shown : end]
        cut = max(0, min(end, len(self._tail) - self._longest + 1))  # what no match can reach any more
        self._tail = self._tail[cut:]
        self._num_shown = end - cut
        return shown
