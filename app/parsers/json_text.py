"""JSON as models write it, read from a scanner: values handed out as they come, and calls as JSON objects."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Container
from typing import Any

from app.parsers.scanner import Mismatch, Scanner, Steps

ARGUMENT_KEYS = ("arguments", "parameters")
HARMLESS_KEYS = ("id", "type", "index")
_OUTSIDE = re.compile(r'["{}\[\]<`]')  # the last two never occur there: they begin the format's next marker
_INSIDE = re.compile(r'["\\\x00-\x1f]')
_SCALAR_END = re.compile(r"[\s,\]}<`]")


class _Value:
    """Follows strings and brackets of one value, to find its end."""

    def __init__(self) -> None:
        self.done = False
        self._depth = 0
        self._in_string = False
        self._escaped = False

    def take(self, text: str) -> tuple[str, int]:
        """The value's part of `text` (control characters in strings escaped), and how many characters it took.

        Mismatch where JSON cannot go on.
        """
        out: list[str] = []
        at = 0
        while at < len(text) and not self.done:
            if self._escaped:
                self._escaped = False
                out.append(text[at])
                at += 1
                continue
            hit = (_INSIDE if self._in_string else _OUTSIDE).search(text, at)
            if hit is None:
                out.append(text[at:])
                return "".join(out), len(text)
            out += (text[at : hit.start()], self._char(hit.group()))
            at = hit.end() if out[-1] else hit.start()
            if not out[-1]:
                self.done = True
        return "".join(out), at

    def _char(self, char: str) -> str:
        """One character that matters; "" for one that cannot stand here."""
        if self._in_string:
            self._escaped = char == "\\"
            self._in_string = char != '"'
            self.done = not self._in_string and not self._depth
            return char if char in '"\\' else json.dumps(char)[1:-1]
        if char in "<`":
            return ""
        self._in_string = char == '"'
        self._depth += (char in "{[") - (char in "}]")
        self.done = self._depth <= 0 and not self._in_string
        return char

    @property
    def is_whole(self) -> bool:
        """True if every bracket is closed."""
        return self._depth == 0


def stream_value(scan: Scanner, write: Callable[[str], None]) -> Steps[None]:
    """Read an object, a list or a string, and hand its text to `write` as it comes. Mismatch when it breaks off."""
    value = _Value()
    while not value.done:
        chunk = yield from scan.chunk()
        if not chunk:
            raise Mismatch
        text, used = value.take(chunk)
        scan.back(len(chunk) - used)
        write(text)
        if value.done and not value.is_whole:
            raise Mismatch


def held_value(scan: Scanner) -> Steps[str]:
    """Read any value; its text."""
    yield from scan.space()
    first = yield from scan.peek()
    read: list[str] = []
    if first and first in '{["':
        yield from stream_value(scan, read.append)
        return "".join(read)
    while chunk := (yield from scan.chunk()):
        end = _SCALAR_END.search(chunk)
        read.append(chunk[: end.start()] if end else chunk)
        if end:
            scan.back(len(chunk) - end.start())
            break
    scalar = "".join(read)
    if loads(scalar) is INVALID:
        raise Mismatch
    return scalar


def read_string(scan: Scanner) -> Steps[str]:
    """Read a string; what it says."""
    text = yield from held_value(scan)
    value = loads(text)
    if not isinstance(value, str):
        raise Mismatch
    return value


INVALID = object()


def loads(text: str) -> Any:
    """The value of JSON text; INVALID when it is none (NaN and infinities are none)."""
    try:
        return json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        return INVALID


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def begin_call(scan: Scanner, name: str) -> Steps[None]:
    """Begin a call at its arguments and read them: an object as it comes, anything else once it is known to be one."""
    yield from scan.space()
    if (yield from scan.peek()) == "{":
        scan.begin_call(name)
        yield from stream_value(scan, scan.say_arguments)
    else:
        text = yield from held_value(scan)
        scan.begin_call(name)
        scan.say_arguments(_as_object(text))


def _as_object(text: str) -> str:
    """Arguments written as JSON text inside a string, or as null, are an object all the same."""
    value = loads(text)
    if value is None:
        return "{}"
    is_object = isinstance(value, str) and value.isprintable() and isinstance(loads(value), dict)
    return value if is_object else text


def json_call(scan: Scanner, known: Container[str] | None = None) -> Steps[None]:
    """Read {"name": ..., "arguments": {...}}, keys in any order; Mismatch when that is not what comes.

    With `known`, only those names make a call.
    """
    name = held = None
    yield from scan.expect("{")
    while not (yield from scan.accept("}")):
        key = yield from read_string(scan)
        yield from scan.expect(":")
        if key == "name" and name is None:
            name = yield from read_string(scan)
            if known is not None and name not in known:
                raise Mismatch
        elif key in ARGUMENT_KEYS and name is not None and held is None:
            yield from begin_call(scan, name)
            # What follows cannot undo the call; if it is no end of one, it is content.
            yield from scan.attempt(_end_of_call(scan), "")
            return
        elif key in ARGUMENT_KEYS and held is None:
            held = yield from held_value(scan)
        else:
            yield from _harmless(scan, key)
        if not (yield from scan.accept(",")):
            yield from scan.expect("}")
            break
    if name is None:
        raise Mismatch
    scan.begin_call(name)
    scan.say_arguments(_as_object(held or "{}"))


def _end_of_call(scan: Scanner) -> Steps[None]:
    while not (yield from scan.accept("}")):
        yield from scan.expect(",")
        key = yield from read_string(scan)
        yield from scan.expect(":")
        yield from _harmless(scan, key)


def _harmless(scan: Scanner, key: str) -> Steps[None]:
    """Read the value of a key that some models add to a call; Mismatch for any other, whose text must not be lost."""
    if key not in HARMLESS_KEYS:
        raise Mismatch
    yield from held_value(scan)
