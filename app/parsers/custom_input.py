"""Calls of custom tools, whose input is text: to the model such a tool is a function of one string, `input`.

Here is what the model is told, what enforces a grammar, and how the string comes out of the call's arguments again.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from app.parsers.json_text import loads
from app.parsers.lark_expression import NoExpressionError, expression_of
from app.parsers.scanner import Part
from app.structured.patterns import ascii_classes

INPUT = "input"
MAX_OPENING = 256  # characters before the string; where more come in pieces, the end tells what they were
_OPENING = re.compile(r'\s*\{\s*"input"\s*:\s*"')
_HIGH, _LOW = r"\\u[dD][89abAB][0-9a-fA-F]{2}", r"\\u[dD][c-fC-F][0-9a-fA-F]{2}"
# What of a JSON string is certain whatever follows: text, a pair of surrogates, half a pair, other escapes, no escape.
_UNIT = re.compile(
    rf'[^"\\]+|{_HIGH}{_LOW}|{_HIGH}(?=[^\\]|\\[^u]|\\u[^dD]|\\u.[^c-fC-F])|\\u(?![dD][89abAB])[0-9a-fA-F]{{4}}'
    r"|\\[^u]|\\u(?=[0-9a-fA-F]{0,3}[^0-9a-fA-F])",
    re.DOTALL,
)


@dataclass(slots=True, frozen=True)
class InputGrammar:
    """Says what the input of a custom tool must match."""

    syntax: Literal["lark", "regex"]
    definition: str

    def lark(self) -> str:
        """The grammar as Lark text, for calls in which the input stands as it is."""
        if self.syntax == "lark":
            return self.definition
        pattern = re.sub(r"\\.|/", lambda found: r"\/" if found.group() == "/" else found.group(), self._bare())
        return "start: TEXT\nTEXT: /" + pattern.replace("\n", r"\n") + "/"

    def expression(self) -> str:
        """The regular expression that the whole input matches; NoExpressionError for a Lark grammar without any."""
        return expression_of(self.definition) if self.syntax == "lark" else self._bare()

    def string(self) -> dict[str, Any]:
        """The grammar as a JSON schema, as models are shown it: a Lark grammar is no more than described there."""
        if self.syntax == "lark":
            return {"type": "string", "description": f"Text that matches this Lark grammar:\n{self.definition}"}
        told = f"Text that matches this regular expression as a whole: {self.definition}"
        return {"type": "string", "description": told, "pattern": f"^(?:{self._bare()})$"}

    def _bare(self) -> str:
        """The expression without the anchors around it: the whole input matches it anyway."""
        pattern = self.definition.removeprefix("^")
        before = pattern[:-1]
        if pattern.endswith("$") and (len(before) - len(before.rstrip("\\"))) % 2 == 0:
            pattern = before
        return ascii_classes(pattern)


def input_schema(grammar: InputGrammar | None) -> dict[str, Any]:
    """Schema of a custom tool's arguments, as models are shown it."""
    text = {"type": "string", "description": "Text, as it is."} if grammar is None else grammar.string()
    return _arguments(text)


def enforced_schema(grammar: InputGrammar | None) -> dict[str, Any]:
    """Schema that the arguments must match; of a Lark grammar without an expression it knows only that it is text."""
    try:
        pattern = None if grammar is None else f"^(?:{grammar.expression()})$"
    except NoExpressionError:
        pattern = None
    return _arguments({"type": "string"} | ({"pattern": pattern} if pattern is not None else {}))


def _arguments(text: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": {INPUT: text}, "required": [INPUT], "additionalProperties": False}


class CustomInputs:
    """Turns the arguments of calls of custom tools into their input, as the text comes; all other parts pass."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._reader: InputReader | None = None  # the open call's, where it is one of a custom tool

    def push(self, parts: list[Part]) -> list[Part]:
        """The parts that are certain."""
        return [out for part in parts for out in self._take(part)]

    def flush(self) -> list[Part]:
        """The answer has ended: what the open call has yet to say."""
        rest = self._reader.finish() if self._reader is not None else ""
        self._reader = None
        return [Part("arguments", rest)] if rest else []

    def _take(self, part: Part) -> Iterator[Part]:
        if part.kind != "arguments":
            yield from self.flush()
            self._reader = InputReader() if part.kind == "call" and part.text in self._names else None
            yield part
        elif self._reader is None:
            yield part
        elif text := self._reader.push(part.text):
            yield Part("arguments", text)


class InputReader:
    """The string in `{"input": "..."}`, which comes in pieces. Arguments of another shape are the input as they are."""

    def __init__(self) -> None:
        self._state: Literal["before", "inside", "after"] = "before"
        self._held = ""
        self._rest: list[str] = []  # of arguments of another shape, which go on

    def push(self, text: str) -> str:
        """Take more of the arguments; return what more of the input is certain."""
        if self._state == "after":
            return ""
        if self._state == "before" and len(self._held) > MAX_OPENING:
            self._rest.append(text)
            return ""
        self._held += text
        if self._state == "before":
            opening = _OPENING.match(self._held)
            if opening is None:
                return ""
            self._state, self._held = "inside", self._held[opening.end() :]
        return self._certain()

    def finish(self) -> str:
        """The arguments have ended, perhaps in their midst."""
        held, self._held = "".join((self._held, *self._rest)), ""
        if self._state == "inside":  # cut off inside an escape, of which nothing can be said
            return "\ufffd" if re.fullmatch(_HIGH, held) else ""
        if self._state == "after":
            return ""
        value = loads(held)
        found = value.get(INPUT) if isinstance(value, dict) else value
        return found if isinstance(found, str) else held

    def _certain(self) -> str:
        said, end = [], 0
        while unit := _UNIT.match(self._held, end):
            said.append(_decoded(unit.group()))
            end = unit.end()
        if self._held[end : end + 1] == '"':
            self._state = "after"
        self._held = self._held[end:]
        return "".join(said)


def _decoded(unit: str) -> str:
    """Returns what a part of a JSON string says; an escape that JSON does not know says itself, half a pair a
    placeholder."""
    if unit[0] != "\\":
        return unit
    try:
        char: str = json.loads(f'"{unit}"')
    except ValueError:
        return unit
    return "\ufffd" if "\ud800" <= char <= "\udfff" else char
