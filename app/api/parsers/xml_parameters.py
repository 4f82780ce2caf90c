"""Tool calls of Qwen3-Coder: <function=name> with a <parameter=key> element for each argument, in <tool_call>.

Values are bare text. Which JSON value one stands for follows from the tool's schema: what may only be a string is
handed out as it comes, everything else once it is whole.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

from app.api.parsers.base import Schema, ToolParser
from app.api.parsers.grammar import CallGrammar, Lark, in_order, property_schema
from app.api.parsers.json_text import INVALID, loads
from app.api.parsers.scanner import MAX_NAME, SPACE, Mismatch, Steps

OPEN, CLOSE = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
_PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}
_TYPES = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}


class Qwen3CoderParser(ToolParser):
    """Qwen3-Coder."""

    markers = (OPEN, CLOSE)

    def parse(self) -> Steps[None]:
        """Content and calls, in any order; the models sometimes leave <tool_call> out."""
        scan = self.scan
        closing: tuple[str, ...] = ()
        while marker := (yield from scan.content(OPEN, FUNCTION, *closing)):
            if marker in (FUNCTION_END, CLOSE):
                closing = () if marker == CLOSE else (CLOSE,)
            elif (yield from scan.attempt(self._call(marker), marker)):
                closing = (FUNCTION_END, CLOSE)

    def _call(self, marker: str) -> Steps[None]:
        scan = self.scan
        if marker == OPEN:
            yield from scan.expect(FUNCTION)
        name, _ = yield from scan.until(">", limit=MAX_NAME)
        scan.begin_call(name.strip())
        scan.say_arguments("{")
        separator = ""
        while (yield from scan.accept(PARAMETER)):
            key, _ = yield from scan.until(">", limit=MAX_NAME)
            scan.say_arguments(f"{separator}{json.dumps(key.strip(), ensure_ascii=False)}: ")
            yield from self._value(_types(self.tools.get(name.strip()), key.strip()))
            separator = ", "
        scan.say_arguments("}")

    def _value(self, types: set[str]) -> Steps[None]:
        """One value up to its closing marker; one new line at either end belongs to the form."""
        scan = self.scan
        yield from scan.match("\n")
        if types == {"string"}:
            scan.say_arguments('"')
            marker = yield from scan.pass_until(
                (PARAMETER_END, FUNCTION_END), lambda text: scan.say_arguments(_escaped(text)), "\n"
            )
            scan.say_arguments(_escaped(scan.gap[:-1]))
            if not marker:  # cut off: the string stays open, as JSON that is cut off does
                raise Mismatch
            scan.say_arguments('"')
        else:
            held: list[str] = []
            marker = yield from scan.pass_until((PARAMETER_END, FUNCTION_END), held.append)
            text = "".join(held)
            if not marker:
                scan.say_arguments(text)
                raise Mismatch
            scan.say_arguments(_typed(text.removesuffix("\n"), types))
        if marker == FUNCTION_END:  # the closing marker of the value was forgotten
            scan.back(len(marker))

    @classmethod
    def call_grammar(cls, special: Collection[str]) -> CallGrammar:
        """Arguments in the order of the schema's properties."""
        before, after = f"{OPEN}\n{FUNCTION}{{name}}>\n", f"{FUNCTION_END}\n{CLOSE}"
        return CallGrammar(before, after, separator="\n", trigger=OPEN, arguments=_lark_arguments)


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
    return _types_of(properties[key], schema, 0)


def _types_of(schema: Any, root: Schema, depth: int) -> set[str]:
    if not isinstance(schema, Mapping) or depth > 8:
        return set()
    if isinstance(kind := schema.get("type"), str):
        return {kind}
    if isinstance(kind, list):
        return {entry for entry in kind if isinstance(entry, str)}
    values = schema["enum"] if isinstance(schema.get("enum"), list) else [schema["const"]] if "const" in schema else []
    found = {"null" if value is None else _TYPES.get(type(value), "") for value in values}
    for word in ("anyOf", "oneOf"):
        for option in schema.get(word) or ():
            found |= _types_of(option, root, depth + 1)
    if isinstance(reference := schema.get("$ref"), str):
        found |= _types_of(_resolve(reference, root), root, depth + 1)
    return found


def _resolve(reference: str, root: Schema) -> Any:
    node: Any = root
    for step in reference.removeprefix("#/").split("/"):
        node = node.get(step) if isinstance(node, Mapping) else None
    return node


def _lark_arguments(lark: Lark, name: str, schema: Mapping[str, Any]) -> str:
    required = schema.get("required") or ()
    parts = []
    for key in schema.get("properties") or {}:
        value = _lark_value(lark, schema, key)
        parts.append((lark.rule(f"{lark.literal(f'{PARAMETER}{key}>' + chr(10))} {value}"), key in required))
    return in_order(parts, "")


def _lark_value(lark: Lark, schema: Mapping[str, Any], key: str) -> str:
    """A value and its closing marker: a string as bare text, everything else as JSON."""
    own = property_schema(schema, key)
    close = f"\n{PARAMETER_END}\n"
    if _types(schema, key) != {"string"}:
        return f"{lark.json(own)} {lark.literal(close)}"
    if isinstance(own.get("enum"), list):
        options = " | ".join(lark.literal(option) for option in own["enum"] if isinstance(option, str))
        return f"({options}) {lark.literal(close)}"
    return f"{lark.text_before(f'{chr(10)}{PARAMETER_END}')} {lark.literal(chr(10))}"
