r"""Regular expressions, as JSON Schema and other servers mean them: \d is a digit of ASCII, \w a word character of it.

The library reads both as the whole of Unicode, where a model at a high temperature finds digits that nobody's parser
takes for some.
"""

from __future__ import annotations

from typing import Any

_ASCII = {"d": "0-9", "w": "A-Za-z0-9_"}
_NAMED = ("properties", "$defs", "definitions")  # schemas by names that are nobody's keywords
_DATA = ("const", "enum", "default", "examples")  # their values are data, whatever it looks like


def ascii_classes(pattern: str) -> str:
    r"""`pattern` with \d and \w spelt out."""
    parts, i, depth = [], 0, 0
    while i < len(pattern):
        char = pattern[i]
        if char == "\\" and i + 1 < len(pattern):
            letters = _ASCII.get(pattern[i + 1])
            parts.append(pattern[i : i + 2] if letters is None else letters if depth else f"[{letters}]")
            i += 2
            continue
        if char == "[":
            depth += 1
        elif char == "]" and depth:
            depth -= 1
        parts.append(char)
        i += 1
    return "".join(parts)


def with_ascii_patterns(schema: Any) -> Any:
    """A copy of a JSON schema whose patterns are as `ascii_classes` writes them."""
    if isinstance(schema, list):
        return [with_ascii_patterns(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    copy: dict[str, Any] = {}
    for key, value in schema.items():
        if key == "pattern" and isinstance(value, str):
            copy[key] = ascii_classes(value)
        elif key == "patternProperties" and isinstance(value, dict):
            copy[key] = {ascii_classes(name): with_ascii_patterns(item) for name, item in value.items()}
        elif key in _NAMED and isinstance(value, dict):
            copy[key] = {name: with_ascii_patterns(item) for name, item in value.items()}
        else:
            copy[key] = value if key in _DATA else with_ascii_patterns(value)
    return copy
