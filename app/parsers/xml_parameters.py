"""Tool calls with an element for each argument, whose value is bare text; each model has its own tags.

Which JSON value a text stands for follows from the tool's schema: what may only be a string is handed out as it comes,
everything else once it is whole.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Collection, Mapping
from typing import Any, ClassVar

from app.parsers.base import NO_TOOLS, Schema, ToolParser, ToolSchemas
from app.parsers.grammar import CallGrammar, Lark, declared, in_order, property_schema
from app.parsers.json_text import INVALID, loads
from app.parsers.scanner import MAX_NAME, SPACE, Mismatch, Steps

_PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}
_TYPES = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
MAX_OPTIONS = 256  # schemas that are looked at for the types of one argument, and entries of a list


class XmlParametersParser(ToolParser):
    """Base: a subclass names the tags."""

    writes_text = True
    open: ClassVar[str]  # opens a call, or all calls
    close: ClassVar[str]
    function: ClassVar[tuple[str, str, str]]  # before the name, after it, after the arguments
    parameter: ClassVar[tuple[str, str, str]]  # before the name, between it and the value, after the value
    has_lines: ClassVar[bool] = False  # a value stands on lines of its own: a new line at either end is no part of it
    after_value: ClassVar[str] = "\n"  # what the model writes after a value's closing tag

    def __init__(self, tools: ToolSchemas = NO_TOOLS) -> None:
        self._found_types: dict[tuple[str, str], set[str]] = {}  # of the arguments that tools declare
        super().__init__(tools)

    def parse(self) -> Steps[None]:
        """Content and calls, in any order; the models sometimes leave the opening tag out."""
        scan = self.scan
        opening, end = self.function[0], self.function[2]
        openings = tuple(filter(None, (self.open, opening)))
        closing: tuple[str, ...] = ()
        while marker := (yield from scan.content(*openings, *closing)):
            if marker in (end, self.close):
                closing = () if marker == self.close else (self.close,)
            elif (yield from scan.attempt(self._call(marker), marker)):
                closing = tuple(dict.fromkeys((end, self.close)))

    def _call(self, marker: str) -> Steps[None]:
        scan = self.scan
        if marker == self.open and self.function[0]:
            yield from scan.expect(self.function[0])
        name = yield from self._name()
        scan.begin_call(name)
        scan.say_arguments("{")
        separator = ""
        while (yield from scan.accept(self.parameter[0])):
            key, is_whole = yield from self._key()
            scan.say_arguments(f'{separator}"{_escaped(key)}')
            if not is_whole:
                raise Mismatch
            scan.say_arguments('": ')
            yield from self._value(self._types(name, key))
            separator = ", "
        scan.say_arguments("}")

    def _types(self, name: str, key: str) -> set[str]:
        """JSON types that an argument may have, looked up in the tool's schema once."""
        known = self._found_types.get((name, key))
        if known is None:
            known = _types(self.tools.get(name), key)
            if key in ((self.tools.get(name) or {}).get("properties") or ()):
                self._found_types[name, key] = known
        return known

    def _name(self) -> Steps[str]:
        """The function's name, and what follows it."""
        name, _ = yield from self.scan.until(self.function[1], limit=MAX_NAME)
        return name.strip()

    def _key(self) -> Steps[tuple[str, bool]]:
        """The argument's name, and whether all that stands before its value was there too."""
        key, _ = yield from self.scan.until(self.parameter[1], limit=MAX_NAME)
        return key.strip(), True

    def _value(self, types: set[str]) -> Steps[None]:
        """One value up to its closing tag."""
        scan, ends, edge = self.scan, (self.parameter[2], self.function[2]), "\n" if self.has_lines else ""
        yield from scan.match("\n") if edge else ()
        if types == {"string"}:
            scan.say_arguments('"')
            marker = yield from scan.pass_until(ends, lambda text: scan.say_arguments(_escaped(text)), edge)
            scan.say_arguments(_escaped(scan.gap[:-1]))
            if not marker:  # cut off: the string stays open, as JSON that is cut off does
                raise Mismatch
            scan.say_arguments('"')
        else:
            held: list[str] = []
            marker = yield from scan.pass_until(ends, held.append)
            text = "".join(held)
            if not marker:
                scan.say_arguments(text)
                raise Mismatch
            scan.say_arguments(_typed(text.removesuffix(edge), types))
        if marker == ends[1]:  # the closing tag of the value was forgotten
            scan.back(len(marker))

    @classmethod
    def call_grammar(cls, special: Collection[str]) -> CallGrammar:
        """One call between the tags, with arguments in the order of the schema's properties."""
        opening, named, end = cls.function
        before, after = f"{cls.open}\n{opening}{{name}}{named}\n", f"{end}\n{cls.close}"
        return CallGrammar(before, after, separator="\n", trigger=cls.open, arguments=cls.lark_arguments)

    @classmethod
    def lark_arguments(cls, lark: Lark, name: str, schema: Mapping[str, Any]) -> str:
        """All arguments, each with its tags."""
        edge, (before, named, end) = "\n" if cls.has_lines else "", cls.parameter
        parts = []
        for key, is_required in declared(schema):
            given = lark.input(name)
            value = f"{given} {lark.literal(edge + end)}" if given else _lark_value(lark, schema, key, edge + end)
            tagged = f"{lark.literal(f'{before}{key}{named}{edge}')} {value} {lark.literal(cls.after_value)}"
            parts.append((lark.rule(tagged.rstrip()), is_required))
        return in_order(parts, "")


def _escaped(text: str) -> str:
    """Text as it stands inside a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _typed(text: str, types: set[str]) -> str:
    """JSON text of a bare value: what the schema allows it to be, a string where it can be nothing else."""
    bare = text.strip(SPACE)
    bare = _PYTHON_WORDS.get(bare, bare)
    value = loads(bare)
    kind = "null" if value is None else _TYPES.get(type(value), "")
    if value is not INVALID:
        is_wanted = kind in types or (kind == "integer" and "number" in types)
        if is_wanted or "string" not in types:
            return bare
    return json.dumps(text, ensure_ascii=False)


def _types(schema: Schema | None, key: str) -> set[str]:
    """JSON types that an argument may have; an argument nobody has declared is a string, one without a type any."""
    properties = (schema or {}).get("properties")
    if schema is None or not isinstance(properties, Mapping) or key not in properties:
        return {"string"}
    return _types_of(properties[key], schema)


def _types_of(schema: Any, root: Schema) -> set[str]:
    """Types of a value by all its options; none, which means any, where those are more than MAX_OPTIONS."""
    found: set[str] = set()
    references: set[str] = set()
    options = deque([schema])
    for _ in range(MAX_OPTIONS):
        if not options:
            return found
        option = options.popleft()
        if not isinstance(option, Mapping):
            continue
        found |= _own_types(option)
        if "type" in option:
            continue
        for word in ("anyOf", "oneOf"):
            options += _first(option.get(word))
        reference = option.get("$ref")
        if isinstance(reference, str) and reference not in references:  # each once: they may lead in circles
            references.add(reference)
            options.append(_resolve(reference, root))
    return set()


def _own_types(schema: Schema) -> set[str]:
    """Types that the schema names itself, or whose values it lists."""
    if "type" in schema:
        kind = schema["type"]
        return {entry for entry in (kind, *_first(kind)) if isinstance(entry, str)}
    values = [schema["const"]] if "const" in schema else _first(schema.get("enum"))
    return {"null" if value is None else _TYPES.get(type(value), "") for value in values}


def _first(values: Any) -> list[Any]:
    """At most MAX_OPTIONS entries of an array; [] where it is none."""
    return values[:MAX_OPTIONS] if isinstance(values, list) else []


def _resolve(reference: str, root: Schema) -> Any:
    node: Any = root
    for step in reference.removeprefix("#/").split("/"):
        node = node.get(step) if isinstance(node, Mapping) else None
    return node


def _lark_value(lark: Lark, schema: Mapping[str, Any], key: str, close: str) -> str:
    """A value and its closing tag: a string as bare text, everything else as JSON."""
    own = property_schema(schema, key)
    if _types(schema, key) != {"string"}:
        return f"{lark.json(own)} {lark.literal(close)}"
    if isinstance(own.get("enum"), list):
        options = " | ".join(lark.literal(option) for option in own["enum"] if isinstance(option, str))
        return f"({options}) {lark.literal(close)}"
    return lark.text_before(close)
