"""Which JSON type an argument of bare text has, and what finding out may cost."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from app.errors import InvalidRequestError
from app.parser_tables import TOOL_PARSERS
from app.parsers.grammar import MAX_ARGUMENTS, MAX_CHARS, Lark
from app.parsers.xml_parameters import MAX_OPTIONS


class CountedSchema(dict[str, Any]):
    """A schema that counts how often it is looked at."""

    num_looks = 0

    def get(self, key: str, default: Any = None) -> Any:
        CountedSchema.num_looks += 1
        return super().get(key, default)


def in_circles(num_options: int) -> dict[str, Any]:
    options = CountedSchema(anyOf=[CountedSchema({"$ref": "#/properties/a"}) for _ in range(num_options)])
    return {"type": "object", "properties": {"a": options}}


def lark_text(schema: Mapping[str, Any], name: str = "qwen3_coder") -> str:
    lark = Lark({})
    return lark.finish(TOOL_PARSERS.load(name).call_grammar(()).required(lark, {"f": schema}, True))


def test_references_in_circles_are_followed_once() -> None:
    CountedSchema.num_looks = 0
    lark_text(in_circles(12))
    assert CountedSchema.num_looks < 12 * 20


def test_options_are_looked_at_up_to_a_number() -> None:
    """References that differ but lead to the same: each argument may name them all."""
    options = [CountedSchema({"$ref": f"#/$defs/x{i % 100}"}) for i in range(5000)]
    shared = {f"x{i}": CountedSchema({"anyOf": [{"type": "string"}] * 100}) for i in range(100)}
    schema = {"properties": {"a": CountedSchema(oneOf=options)}, "$defs": CountedSchema(shared)}
    CountedSchema.num_looks = 0
    assert "%json" in lark_text(schema)
    assert CountedSchema.num_looks < 5 * MAX_OPTIONS


@pytest.mark.parametrize(
    ("own", "is_bare"),
    [
        ({"anyOf": [{"type": "string"}, {"$ref": "#/$defs/word"}]}, True),
        ({"enum": ["a", "b"]}, True),
        ({"$ref": "#/$defs/word"}, True),
        ({"type": ["string", "null"]}, False),
        ({"anyOf": [{"type": "string"}, {"oneOf": [{"const": 5}]}]}, False),
        ({"$ref": "#/$defs/nothing"}, False),
        ({"anyOf": 5, "oneOf": {"a": 1}}, False),
        ({"type": 5}, False),
    ],
)
def test_only_strings_are_bare_text(own: dict[str, Any], is_bare: bool) -> None:
    text = lark_text({"properties": {"a": own}, "$defs": {"word": {"const": "w"}}})
    assert ("%json" not in text) == is_bare


@pytest.mark.parametrize("name", ["qwen3_coder", "pythonic"])
def test_what_cannot_be_enforced_is_refused(name: str) -> None:
    many = {f"p{i}": {"type": "integer"} for i in range(MAX_ARGUMENTS + 1)}
    with pytest.raises(InvalidRequestError, match="tools: 1025 arguments") as refused:
        lark_text({"properties": many}, name)
    assert refused.value.param == "tools"
    large = {"$defs": {"x": {"description": "x" * (MAX_CHARS // 10)}}}
    with pytest.raises(InvalidRequestError, match=f"more than {MAX_CHARS} characters"):
        lark_text({"properties": {f"p{i}": {"minimum": i} for i in range(11)}, **large}, name)
    assert lark_text({"properties": 5, "required": 5}, name)
