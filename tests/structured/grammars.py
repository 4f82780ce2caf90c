"""Grammars whose answers are bounded, each with a judge that is not ours: jsonschema, re, or plain comparison.

White space is off for the JSON, and strings, arrays and numbers are bounded, so that `MAX_TOKENS` covers the longest
answer even when each token is one byte.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import jsonschema

from app.records.sampling_params import StructuredOutputs

MAX_TOKENS = 400
Judge = Callable[[str], bool]


def closed(required: list[str] | None = None, **properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties) if required is None else required,
        "additionalProperties": False,
    }


SHORT = {"type": "string", "maxLength": 8}
SMALL = {"type": "integer", "minimum": -20, "maximum": 300}
SCHEMAS: dict[str, dict[str, Any]] = {
    "flat": closed(name=SHORT, age=SMALL, ok={"type": "boolean"}),
    "optional": closed(["a"], a=SMALL, b=SHORT, c={"type": "null"}),
    "nested": closed(a=closed(b=closed(c=closed(d=SMALL)))),
    "ref": {"$defs": {"p": closed(x=SMALL, y=SMALL)}, **closed(a={"$ref": "#/$defs/p"}, b={"$ref": "#/$defs/p"})},
    "recursion": {
        "$defs": {
            "n0": closed(v=SMALL),
            "n1": closed(v=SMALL, next={"anyOf": [{"$ref": "#/$defs/n0"}, {"type": "null"}]}),
        },
        "$ref": "#/$defs/n1",
    },
    "enum": closed(a={"enum": ["x", 'q"\\', 3, None, True, [1, {"k": "v"}]]}),
    "const": closed(a={"const": {"deep": [1, "é 🙂"]}}, b={"const": -1.5}),
    "date-time": closed(at={"type": "string", "format": "date-time", "maxLength": 40}),
    "date-uuid": closed(d={"type": "string", "format": "date"}, u={"type": "string", "format": "uuid"}),
    "ipv4": closed(ip={"type": "string", "format": "ipv4"}),
    "email": closed(e={"type": "string", "format": "email", "maxLength": 24}),
    "bounded-array": {"type": "array", "items": SMALL, "minItems": 2, "maxItems": 5},
    "array-of-objects": {"type": "array", "items": closed(k=SHORT), "minItems": 1, "maxItems": 3},
    "tuple": {"type": "array", "prefixItems": [SHORT, SMALL], "items": False, "minItems": 2},
    "any-of": {"anyOf": [closed(a=SMALL), closed(b=SHORT), {"type": "null"}]},
    "one-of": {"oneOf": [{"type": "integer", "minimum": 0, "maximum": 9}, {"type": "string", "maxLength": 3}]},
    "all-of": {"allOf": [{"type": "integer", "minimum": 5, "maximum": 50}, {"multipleOf": 5}]},
    "exclusive": closed(n={"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 4}),
    "pattern": closed(id={"type": "string", "pattern": r"^[A-Z]{3}-\d{4}$"}, s={**SHORT, "minLength": 2}),
    "types": closed(v={"type": ["integer", "boolean", "null"], "minimum": 0, "maximum": 99}),
}  # fmt: skip
REGEXES = {
    "number": r"-?[0-9]{1,6}",
    "phone": r"\+\d{2} \d{3} \d{4}",
    "either": r"(cat|dog|bird){1,3}",
    "class": r"[^a-y \n]{1,10}",
    "unicode": r"[äöü]{2,5}ß?",
    "words": r"([a-z]{1,6} ){0,4}[a-z]{1,6}\.",
    "time": r"([01][0-9]|2[0-3]):[0-5][0-9]",
    "nested": r"(a(b(c|d){1,2}){1,2}){1,3}",
    "case": r"(?i)hello",
    "redos": r"(a{1,9}){1,9}b",
}
CHOICES = [
    ["yes", "no"],
    ["a", "ab", "abc"],
    ["grüße 🙂", "東京", "नमस्ते"],
    ['with "quotes"', "back\\slash/", "new\nline"],
    [str(i) for i in range(100)],
]
GRAMMARS: dict[str, tuple[str, str]] = {  # grammar, and a regular expression for the same language
    "sql": (
        'start: "SELECT " col ("," col)? " FROM " tab\ncol: "a" | "b" | "count(*)"\ntab: "t" | "u"\n',
        r"SELECT (a|b|count\(\*\))(,(a|b|count\(\*\)))? FROM [tu]",
    ),
    "terminals": (
        'start: KEY "=" VALUE (";" KEY "=" VALUE)?\nKEY: /[a-z]{1,5}/\nVALUE: /[0-9]{1,5}/\n',
        r"[a-z]{1,5}=[0-9]{1,5}(;[a-z]{1,5}=[0-9]{1,5})?",
    ),
    "gbnf": ('root ::= "<" tag ">" [0-9] "</>"\ntag ::= "b" | "i" | "em"\n', r"<(b|i|em)>[0-9]</>"),
}


def obeys(schema: dict[str, Any], text: str) -> bool:
    """jsonschema's word, formats included."""
    try:
        value = json.loads(text)
        jsonschema.validate(value, schema, format_checker=jsonschema.FormatChecker())
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


def all_grammars() -> dict[str, tuple[StructuredOutputs, Judge]]:
    """name -> (what to ask for, what judges the answer)."""
    found: dict[str, tuple[StructuredOutputs, Judge]] = {}
    for name, schema in SCHEMAS.items():
        spec = StructuredOutputs(json=schema, disable_any_whitespace=True)
        found[f"json-{name}"] = (spec, lambda text, schema=schema: obeys(schema, text))
    for name, regex in REGEXES.items():
        judge = lambda text, regex=regex: re.fullmatch(regex, text) is not None  # noqa: E731
        found[f"regex-{name}"] = (StructuredOutputs(regex=regex), judge)
    for i, choice in enumerate(CHOICES):
        found[f"choice-{i}"] = (StructuredOutputs(choice=tuple(choice)), lambda text, choice=choice: text in choice)
    for name, (grammar, regex) in GRAMMARS.items():
        judge = lambda text, regex=regex: re.fullmatch(regex, text) is not None  # noqa: E731
        found[f"grammar-{name}"] = (StructuredOutputs(grammar=grammar), judge)
    return found
