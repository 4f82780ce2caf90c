"""Words of a transcript and when they were said, by the tokens that they are written with.

Which tokens are a word is what Whisper's own program says, and transformers after it: in most languages a word begins
with a space, and punctuation belongs to the word beside it; where a script has no spaces, each character is one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from string import punctuation

WITHOUT_SPACES = frozenset({"zh", "ja", "th", "lo", "my", "yue"})  # codes of languages
_BEFORE = "\"'“¡¿([{-"  # what belongs to the word behind it
_BEHIND = "\"'.。,，!！?？:：”)]}、"
_HALF = "\ufffd"  # of a character whose other bytes come with the next token


@dataclass(slots=True, frozen=True)
class Word:
    """A word and when it was said, in seconds of the sound."""

    word: str
    start: float
    end: float


@dataclass(slots=True)
class _Run:
    """Consecutive tokens that are read as one: their text, and the places of the first and the last."""

    text: str
    first: int
    last: int

    def join(self, other: _Run) -> None:
        """Take in the run behind it."""
        self.text, self.last = self.text + other.text, other.last


def words_of(
    token_ids: Sequence[int],
    ends_s: Sequence[float],
    is_text: Callable[[int], bool],
    is_time: Callable[[int], bool],
    decode: Callable[[Sequence[int]], str],
    bounds_s: tuple[float, float],
    *,
    has_spaces: bool,
) -> list[Word]:
    """The words of a piece that lies between `bounds_s` in its sound; `ends_s`: when each token was heard, from the
    piece's begin. None of them goes on behind a time that the model wrote."""
    begin_s, end_s = bounds_s
    found: list[Word] = []
    kept = [place for place, token in enumerate(token_ids) if is_text(token) or is_time(token)]
    for has_time, places in groupby(kept, key=lambda place: is_time(token_ids[place])):
        if has_time:
            continue
        for run in _runs(list(places), token_ids, decode, has_spaces=has_spaces):
            if not run.text.strip():
                continue
            start = min(begin_s + (ends_s[run.first - 1] if run.first else 0.0), end_s)
            end = min(begin_s + ends_s[run.last], end_s)
            found.append(Word(run.text.strip(), round(start, 2), round(max(start, end), 2)))
    return found


def _runs(
    places: list[int], token_ids: Sequence[int], decode: Callable[[Sequence[int]], str], *, has_spaces: bool
) -> list[_Run]:
    characters = _characters(places, token_ids, decode)
    if not has_spaces:
        return _with_punctuation(characters)
    words: list[_Run] = []
    for run in characters:
        is_mark = run.text.strip() in punctuation  # "" is, too
        if not words or run.text.startswith(" ") or is_mark:
            words.append(run)
        else:
            words[-1].join(run)
    return _with_punctuation(words)


def _characters(places: list[int], token_ids: Sequence[int], decode: Callable[[Sequence[int]], str]) -> list[_Run]:
    """Runs of tokens that are whole characters."""
    whole = decode([token_ids[place] for place in places])
    runs: list[_Run] = []
    first, length = 0, 0  # length: of the text before it
    for last, place in enumerate(places):
        text = decode([token_ids[at] for at in places[first : last + 1]])
        at = length + text.find(_HALF)
        if _HALF not in text or at >= len(whole) or whole[at] == _HALF:
            runs.append(_Run(text, places[first], place))
            first, length = last + 1, length + len(text)
    return runs


def _with_punctuation(words: list[_Run]) -> list[_Run]:
    """The same with marks joined to the words that they belong to."""
    opened: list[_Run] = []
    for word in reversed(words):  # marks before a word, from the last on
        if opened and word.text.startswith(" ") and word.text.strip() in _BEFORE:
            word.join(opened.pop())
        opened.append(word)
    closed: list[_Run] = []
    for word in reversed(opened):
        if closed and word.text in _BEHIND and not closed[-1].text.endswith(" "):
            closed[-1].join(word)
        else:
            closed.append(word)
    return closed
