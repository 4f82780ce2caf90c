"""Tool calls written as Python: [get_weather(city="Paris"), other(n=3)].

An answer is calls only if it begins with such a list and names offered tools. Arguments are keywords with literal
values; each call is reported when its bracket closes. Nothing is ever evaluated: the text is parsed to a syntax tree.
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from app.parsers.base import ToolParser
from app.parsers.grammar import CallGrammar, Lark, declared, in_order, property_schema
from app.parsers.scanner import MAX_NAME, Mismatch, Scanner, Steps

START, END = "<|python_start|>", "<|python_end|>"
LFM_START, LFM_END = "<|tool_call_start|>", "<|tool_call_end|>"
_JSON_NAMES = {"true": True, "false": False, "null": None}
_STRING = re.compile(r"""'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*\"""", re.S)
_MATTERS = re.compile(r"""["'()\[\]{}\\<]""")


class PythonicParser(ToolParser):
    """Llama 3.2 (small), Llama 4, LFM2 and others that were taught to answer in Python."""

    markers = (START, END, LFM_START, LFM_END)

    def parse(self) -> Steps[None]:
        """A list of calls if the answer begins with one, or after the marker; all else is content."""
        scan = self.scan
        before = yield from scan.space()
        marked = yield from scan.match(START, LFM_START)
        scan.gap = before + ((yield from scan.space()) if marked else "")
        if (yield from scan.match("[")):
            yield from self._calls("[")
        else:
            scan.say_content(scan.gap)
        while (yield from scan.content(*self.markers)):
            gap = scan.gap
            if (yield from scan.accept("[")):
                scan.gap = gap
                yield from self._calls("[")

    def _calls(self, opening: str) -> Steps[None]:
        scan = self.scan
        while (yield from scan.attempt(self._call(), opening)):
            opening = ""
            if not (yield from scan.accept(",")):
                break
        if not opening:
            yield from scan.accept("]")

    def _call(self) -> Steps[None]:
        scan = self.scan
        yield from scan.space()
        name, _ = yield from scan.until("(", limit=MAX_NAME)
        if name.strip() not in self.tools:
            raise Mismatch
        text = yield from _to_bracket(scan)
        arguments = _keywords(text)
        scan.begin_call(name.strip())
        scan.say_arguments(arguments)

    @classmethod
    def call_grammar(cls, special: Collection[str]) -> CallGrammar:
        """A list of calls; JSON's words for constants are understood too, so values may be JSON."""
        calls = CallGrammar(
            "{name}(", ")", begin="[", separator=", ", end="]", trigger="[", is_first=True, arguments=_lark_arguments
        )
        if LFM_START not in special:
            return calls
        return replace(calls, begin=f"{LFM_START}[", end=f"]{LFM_END}", trigger=LFM_START, is_first=False)


def _to_bracket(scan: Scanner) -> Steps[str]:
    """Read up to the bracket that closes a call, and over it; the text before it."""
    read: list[str] = []
    depth, quote, escaped = 1, "", False
    while chunk := (yield from scan.chunk()):
        at = 0
        if escaped:
            at, escaped = 1, False
        while hit := _MATTERS.search(chunk, at):
            at, char = hit.end(), hit.group()
            if quote and char == "\\":
                escaped = at == len(chunk)
                at += 1
            elif quote:
                quote = "" if char == quote else quote
            elif char in "\"'":
                quote = char
            elif char == "<":  # in no literal: it may begin a marker, behind which another call may stand
                scan.back(len(chunk) - at)
                raise Mismatch
            elif char != "\\":
                depth += 1 if char in "([{" else -1
            if depth == 0:
                scan.back(len(chunk) - at)
                return "".join(read) + chunk[: at - 1]
        read.append(chunk)
    raise Mismatch


def _keywords(text: str) -> str:
    """JSON object of a call's keyword arguments; Mismatch when they are not all literals."""
    try:
        with warnings.catch_warnings():  # about escapes that Python does not know
            warnings.simplefilter("ignore")
            # Some models' templates write the lines of a string as they are.
            text = _STRING.sub(lambda found: found.group().replace("\n", "\\n").replace("\r", "\\r"), text)
            tree = ast.parse(f"f({text.strip()}\n)", mode="eval").body
        if not isinstance(tree, ast.Call) or tree.args:
            raise Mismatch
        values = {keyword.arg: _literal(keyword.value) for keyword in tree.keywords}
        if None in values:  # **something
            raise Mismatch
        return json.dumps(values, ensure_ascii=False, allow_nan=False).encode("utf-8").decode("utf-8")
    except UnicodeError:
        return _paired(json.dumps(values, allow_nan=False))
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError) as error:
        raise Mismatch from error


def _paired(text: str) -> str:
    """JSON without halves of surrogate pairs: whole pairs become their character, halves U+FFFD."""
    value = json.dumps(json.loads(text), ensure_ascii=False)
    return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


class _JsonNames(ast.NodeTransformer):
    """true, false and null mean what they mean in JSON."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        """Replace one of the three names."""
        return ast.Constant(_JSON_NAMES[node.id]) if node.id in _JSON_NAMES else node


def _literal(node: ast.expr) -> Any:
    return ast.literal_eval(_JsonNames().visit(node))


def _lark_arguments(lark: Lark, name: str, schema: Mapping[str, Any]) -> str:
    parts = [
        (lark.rule(f"{lark.literal(key + '=')} {lark.json(property_schema(schema, key))}"), is_required)
        for key, is_required in declared(schema)
    ]
    return lark.rule(in_order(parts, lark.literal(", ")))
