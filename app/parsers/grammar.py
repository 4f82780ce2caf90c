"""The grammar of an answer that must call tools, or must call strict ones rightly: Lark text for structured outputs.

Each tool parser says how its models write calls (`CallGrammar`); the arguments follow the tool's schema.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from app.errors import InvalidRequestError

# JSON as the models' templates write it, so that the grammar does not lead them off their ways.
_HEADER = "%llguidance {}"  # the dialect of Lark that knows JSON schemas
_TEXT = r"(.|\n)*"
_JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
MAX_CHARS = 4 << 20  # one Lark text: each argument repeats the definitions of its tool
MAX_ARGUMENTS = 1024  # for one tool, where each has an expression of its own


class Lark:
    """Builds one Lark text. Markers that are tokens of their own are named by their ids, as no text matches them.

    `inputs` holds the grammars of custom tools' inputs, by the tools' names.
    """

    def __init__(self, marker_ids: Mapping[str, int], inputs: Mapping[str, str] = MappingProxyType({})) -> None:
        self._ids = dict(marker_ids)
        self._inputs = inputs
        self._split = re.compile("(" + "|".join(map(re.escape, self._ids)) + ")") if self._ids else None
        self._names: dict[str, str] = {}
        self._num_chars = 0

    def literal(self, text: str) -> str:
        """An expression for exactly this text."""
        pieces = self._split.split(text) if self._split else [text]
        return " ".join(
            f"<[{self._ids[piece]}]>" if piece in self._ids else _quoted(piece) for piece in pieces if piece
        )

    def text_before(self, marker: str) -> str:
        """An expression for any text without `marker`, followed by it."""
        body = f"{self.text()} {self.literal(marker)}"
        return self.rule(body) if marker in self._ids else self.rule(body, lazy=True)

    def input(self, tool: str) -> str | None:
        """An expression for the input of a custom tool, written as it is; None where it has no grammar."""
        definition = self._inputs.get(tool)
        return None if definition is None else self.rule(f"%lark {{\n{definition}\n}}")

    def text(self) -> str:
        """An expression for any text."""
        return self.rule(f"/{_TEXT}/")

    def json(self, schema: Mapping[str, Any] | bool) -> str:
        """An expression for a JSON value of `schema`."""
        if isinstance(schema, bool):
            schema = {} if schema else {"not": {}}
        return self.rule("%json " + json.dumps({**schema, "x-guidance": _JSON_STYLE}, ensure_ascii=False))

    def rule(self, body: str, *, lazy: bool = False) -> str:
        """A name for an expression; the same name for the same one. A lazy one ends as soon as it can."""
        line = f"{'[lazy]' if lazy else ''}: {body}"
        if line not in self._names:
            self._num_chars += len(line)
            if self._num_chars > MAX_CHARS:
                what = f"make a grammar of more than {MAX_CHARS} characters, which cannot be enforced"
                raise InvalidRequestError(f"tools: the schemas {what}", param="tools")
            self._names[line] = f"{'T' if body.startswith('/') else 'r'}{len(self._names)}"
        return self._names[line]

    def finish(self, start: str) -> str:
        """The whole text; `start` is the expression that an answer matches."""
        return "\n".join([_HEADER, f"start: {start}", *(name + line for line, name in self._names.items())])


Arguments = Callable[[Lark, str, Mapping[str, Any]], str]  # builder, tool's name, schema -> expression


def json_arguments(lark: Lark, name: str, schema: Mapping[str, Any]) -> str:
    """Arguments as one JSON object."""
    return lark.json({"type": "object", **schema})


@dataclass(slots=True, frozen=True)
class CallGrammar:
    """Says how calls are written: `begin`, one or more calls with `separator` between them, `end`.

    `before` and `after` surround the arguments of a call; {name} stands for the function's name. `trigger` begins a
    call inside free text; None where a format has no such mark.
    """

    before: str
    after: str
    begin: str = ""
    separator: str = ""
    end: str = ""
    trigger: str | None = None
    is_first: bool = False  # the trigger counts only where it begins the answer
    arguments: Arguments = json_arguments
    lead: Callable[[Lark], str] | None = None  # what may come before the first call
    is_single: bool = False  # one call an answer

    def call(self, lark: Lark, name: str, schema: Mapping[str, Any]) -> str:
        """An expression for a call of one tool."""
        before, after = (lark.literal(text.replace("{name}", name)) for text in (self.before, self.after))
        return f"{before} {self.arguments(lark, name, schema)} {after}".strip()

    def required(self, lark: Lark, tools: Mapping[str, Mapping[str, Any]], parallel: bool) -> str:
        """An expression for an answer that calls one or more of `tools` and says nothing else."""
        call = lark.rule(" | ".join(self.call(lark, name, schema) for name, schema in tools.items()))
        more = f"({lark.literal(self.separator)} {call})*" if parallel and not self.is_single else ""
        lead = self.lead(lark) if self.lead else ""
        return " ".join(filter(None, (lead, lark.literal(self.begin), call, more, lark.literal(self.end))))

    def allowed(self, lark: Lark, tools: Mapping[str, Mapping[str, Any]], parallel: bool) -> str:
        """An expression for an answer that may call `tools`, anywhere in free text."""
        assert self.trigger is not None, "a format without a trigger"
        if self.is_first:
            other = lark.rule(f"/[^{re.escape(self.trigger)}]{_TEXT}/")
            return f"{self.required(lark, tools, parallel)} | {other}"
        opening, text = lark.text_before(self.trigger), lark.text()
        if self.begin:  # all calls in one place
            rest = replace(self, begin=self.begin.removeprefix(self.trigger)).required(lark, tools, parallel)
            return f"{opening} {rest} | {text}"
        inner = replace(self, before=self.before.removeprefix(self.trigger))
        calls = " | ".join(inner.call(lark, name, schema) for name, schema in tools.items())
        return f"({opening} ({calls})){'*' if parallel else '?'} {text}"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def declared(schema: Mapping[str, Any]) -> list[tuple[str, bool]]:
    """The arguments of a tool, and whether each is required. InvalidRequestError where they are too many."""
    properties, required = schema.get("properties"), schema.get("required")
    names = list(properties) if isinstance(properties, Mapping) else []
    if len(names) > MAX_ARGUMENTS:
        what = f"{len(names)} arguments of one tool; at most {MAX_ARGUMENTS} can be enforced"
        raise InvalidRequestError(f"tools: {what}", param="tools")
    needed = {name for name in required if isinstance(name, str)} if isinstance(required, list) else set()
    return [(name, name in needed) for name in names]


def property_schema(root: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Schema of one argument, with the definitions of the whole beside it, so that its references hold."""
    own = root.get("properties", {}).get(name, {})
    own = {} if own is True or not isinstance(own, Mapping) else dict(own)
    return own | {key: root[key] for key in ("$defs", "definitions") if key in root}


def in_order(parts: Sequence[tuple[str, bool]], separator: str) -> str:
    """An expression for `parts` (expression, required) in their order, `separator` between those that are there."""
    if not parts:
        return '""'
    if not separator:
        return " ".join(part if needed else f"({part})?" for part, needed in parts)
    # Each alternative begins with another part: what comes before it is left out, so it must be optional.
    options = []
    for i, (part, needed) in enumerate(parts):
        rest = " ".join(f"{separator} {p}" if must else f"({separator} {p})?" for p, must in parts[i + 1 :])
        options.append(f"{part} {rest}".strip())
        if needed:
            return "(" + " | ".join(options) + ")"
    return "(" + " | ".join(options) + ")?"
