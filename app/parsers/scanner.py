"""The incremental core of all parsers: text that arrives in pieces, read as if it were whole.

Parsers are generators. Every method that may need more text than there is suspends its caller (`yield from`) until a
piece comes or the text ends. Two things are built on that: text is handed out as soon as it is certain (the beginning
of a marker and the white space before it are held back), and an attempt to read a call can be undone.

All work is linear in the text, however it is cut: a character that was looked at is not looked at again with the next
piece, and text that must wait is kept as pieces, which are joined once.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, TypeVar

from app.bounds import FUNCTION_NAME

T = TypeVar("T")
Steps = Generator[None, None, T]
SPACE = " \t\r\n"
MAX_REREAD = 4096  # characters that are read again after a failed attempt; bounds the work on hostile text
MAX_NAME = 256  # characters in which the end of a name must come
MAX_CHUNK = 4096  # characters that `chunk` hands out at once: what a value leaves of them was copied for nothing

PartKind = Literal["reasoning", "content", "call", "arguments"]


class Mismatch(Exception):
    """The text is not what the format asks for at this place, or has ended too early."""


@dataclass(slots=True)
class Part:
    """A piece of an answer, in order: `call` begins a call and holds its name, `arguments` adds to the last call's."""

    kind: PartKind
    text: str


class Scanner:
    """The text of one choice: what has come, how far it is read, what it has turned out to be."""

    def __init__(self) -> None:
        self.ended = False
        self.num_calls = 0
        self.gap = ""  # white space before the marker found last
        self._text = ""  # unread text, and what was read of it since the last wait
        self._pos = 0
        self._attempt: _Attempt | None = None  # what is read must be kept
        self._said: list[tuple[PartKind, list[str]]] = []

    # What goes in and out.

    def feed(self, text: str) -> None:
        """Take in more text."""
        self._text += text

    def take_parts(self) -> list[Part]:
        """Returns what has become certain since the last call."""
        said, self._said = self._said, []
        return [Part(kind, "".join(texts)) for kind, texts in said]

    def take_rest(self) -> str:
        """All text that is there and unread."""
        rest, self._text, self._pos = self._text[self._pos :], "", 0
        return rest

    def say(self, kind: PartKind, text: str) -> None:
        """Add to the answer; neighbours of a kind become one part."""
        if not text:
            return
        if self._said and self._said[-1][0] == kind:
            self._said[-1][1].append(text)
        else:
            self._said.append((kind, [text]))

    def say_content(self, text: str) -> None:
        """Add content."""
        self.say("content", text)

    def say_arguments(self, text: str) -> None:
        """Add to the arguments of the call begun last."""
        self.say("arguments", text)

    def begin_call(self, name: str) -> None:
        """It is a call: what was read of it will not be undone. Mismatch when the name is none."""
        if not _NAME.fullmatch(name):
            raise Mismatch
        self._said.append(("call", [name]))
        self.num_calls += 1
        self._attempt = None

    # Reading.

    def more(self) -> Steps[bool]:
        """Wait for text; False when there will be none."""
        if self.ended:
            return False
        if self._attempt is not None:
            self._attempt.keep(self._text, self._pos)
        self._text, self._pos = self._text[self._pos :], 0
        yield
        return True

    def peek(self) -> Steps[str]:
        """The next character, "" at the end."""
        while self._pos >= len(self._text):
            if not (yield from self.more()):
                return ""
        return self._text[self._pos]

    def chunk(self) -> Steps[str]:
        """Returns what is there, at least a character; "" at the end. Reads it; `back` undoes a part."""
        yield from self.peek()
        chunk = self._text[self._pos : self._pos + MAX_CHUNK]
        self._pos += len(chunk)
        return chunk

    def back(self, count: int) -> None:
        """Make the last `count` characters unread, where they have been read since the last wait."""
        self._pos -= count

    def space(self) -> Steps[str]:
        """Read white space."""
        read: list[str] = []
        while (char := (yield from self.peek())) and char in SPACE:
            found = _SPACES.match(self._text, self._pos)
            assert found is not None
            read.append(found.group())
            self._pos = found.end()
        return "".join(read)

    def match(self, *literals: str) -> Steps[str]:
        """Read the literal that comes next and return it; "" when none of them does."""
        longest = max(map(len, literals))
        while True:
            for literal in literals:
                if self._text.startswith(literal, self._pos):
                    self._pos += len(literal)
                    return literal
            rest = self._text[self._pos : self._pos + longest]
            if not any(literal.startswith(rest) for literal in literals) or not (yield from self.more()):
                return ""

    def accept(self, literal: str) -> Steps[bool]:
        """Read `literal`, if it comes next after white space."""
        yield from self.space()
        return bool((yield from self.match(literal)))

    def expect(self, literal: str) -> Steps[None]:
        """Read white space and `literal`; Mismatch otherwise."""
        if not (yield from self.accept(literal)):
            raise Mismatch

    def until(self, *markers: str, limit: int) -> Steps[tuple[str, str]]:
        """Read up to the first marker and over it: the text before it, and the marker.

        Mismatch when the text ends without one, or none comes within `limit` characters.
        """
        found = _markers(markers)
        checked = 0  # characters behind the position in which no marker begins
        while True:
            start = self._pos
            end = start + limit + found.longest
            hit = found.pattern.search(self._text, start + checked, end)
            if hit is not None and hit.start() - start <= limit:
                self._pos = hit.end()
                return self._text[start : hit.start()], hit.group()
            checked = max(checked, len(self._text) - start - found.longest + 1)
            if hit is not None or checked > limit or not (yield from self.more()):
                raise Mismatch

    def pass_until(self, markers: tuple[str, ...], write: Callable[[str], None], held: str = "") -> Steps[str]:
        """Give text to `write` as it becomes certain, up to the first marker and over it; "" at the end.

        Characters of `held` before the marker, or at the end, are not written: they are the `gap`.
        """
        found = _markers(markers)
        waiting: list[str] = []  # characters of `held`, apart from the text: a marker can no more begin in them
        while True:
            hit = found.pattern.search(self._text, self._pos)
            stop = hit.start() if hit else (len(self._text) if self.ended else found.undecided(self._text, self._pos))
            passed = self._text[self._pos : stop]
            kept = passed.rstrip(held) if held else passed
            if kept:
                write("".join((*waiting, kept)))
                waiting.clear()
            if len(kept) < len(passed):
                waiting.append(passed[len(kept) :])
            self._pos = stop
            if hit is not None or self.ended:
                self.gap = "".join(waiting)
                self._pos = hit.end() if hit is not None else len(self._text)
                return hit.group() if hit is not None else ""
            yield from self.more()

    def content(self, *markers: str) -> Steps[str]:
        """Everything up to the next marker is content; returns the marker, "" at the end.

        White space before a marker belongs to it (`gap`); so does what follows the last call of an answer.
        """
        marker = yield from self.pass_until(markers, self.say_content, SPACE)
        if not marker and not self.num_calls:
            self.say_content(self.gap)
        return marker

    def attempt(self, steps: Steps[None], opening: str) -> Steps[bool]:
        """Read something with `steps`; False when it is not there: then `opening`, which came before it, is content.

        What was read of it is read again as content. A call that has begun remains one, even if it breaks off.
        """
        opening, num_calls = self.gap + opening, self.num_calls
        self.gap, self._attempt = "", _Attempt(self._pos)
        attempt = self._attempt
        try:
            yield from steps
        except Mismatch:
            has_failed = self.num_calls == num_calls
        else:
            has_failed = False
        self._attempt = None
        if not has_failed:
            return True
        self.say_content(opening)
        attempt.keep(self._text, self._pos)
        if attempt.num_chars > MAX_REREAD:
            self.say_content("".join(attempt.pieces))
        elif len(attempt.pieces) == 1:
            self._pos = attempt.first
        else:
            self._text, self._pos = "".join((*attempt.pieces, self._text[self._pos :])), 0
        return False


class _Attempt:
    """Holds what an attempt has read, as it came."""

    def __init__(self, start: int) -> None:
        self.pieces: list[str] = []
        self.num_chars = 0
        self.first = start  # position of its first character in the text that was there when it began
        self._start = start

    def keep(self, text: str, end: int) -> None:
        """It has read `text` up to `end`; what comes is read from the beginning of another text."""
        self.pieces.append(text[self._start : end])
        self.num_chars += end - self._start
        self._start = 0


_SPACES = re.compile(rf"[{SPACE}]+")
_NAME = re.compile(FUNCTION_NAME)


class _Markers:
    """A set of markers, compiled."""

    def __init__(self, markers: tuple[str, ...]) -> None:
        self._markers = markers
        self._firsts = frozenset(marker[0] for marker in markers)
        self.longest = max(map(len, markers))
        self.pattern = re.compile("|".join(map(re.escape, sorted(markers, key=len, reverse=True))))

    def undecided(self, text: str, start: int) -> int:
        """Finds where the end of `text` begins that a marker may begin with."""
        for position in range(max(start, len(text) - self.longest + 1), len(text)):
            if text[position] in self._firsts and any(m.startswith(text[position:]) for m in self._markers):
                return position
        return len(text)


@lru_cache(maxsize=256)
def _markers(markers: tuple[str, ...]) -> _Markers:
    return _Markers(markers)
