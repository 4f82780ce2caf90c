"""The Hermes parser: cut anywhere, it finds the same."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.parser_tables import TOOL_PARSERS, tool_parser_name
from app.parsers.base import ParsedAnswer, ParsedCall
from app.parsers.scanner import Part


def parse(pieces: list[str]) -> ParsedAnswer:
    parser, answer = TOOL_PARSERS.load("hermes")(), ParsedAnswer()
    for piece in pieces:
        answer.add(parser.push(piece))
    answer.add(parser.flush())
    return answer


def call(name: str, **arguments: object) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}\n</tool_call>"


LONG, OWN = "n" * 129, "größe"  # names that a client could not send back
CASES = [
    (call("a" * 128), "", ["a" * 128]),
    (call(LONG, x=1), call(LONG, x=1), []),
    (call("get:it"), call("get:it"), []),
    (call(OWN), call(OWN), []),
    ("just text, a < b and <tool", "just text, a < b and <tool", []),
    ("  spaces \n\n", "  spaces \n\n", []),
    (call("f", x=1), "", ["f"]),
    ("Let me see.\n" + call("f", x="</tool_calls> ü") + "\n" + call("g"), "Let me see.", ["f", "g"]),
    (call("f") + "\nDone. ", "\nDone.", ["f"]),
    ("<tool_call>not json</tool_call> after", "<tool_call>not json</tool_call> after", []),
    ("before \n<tool_call>[1]</tool_call>", "before \n<tool_call>[1]</tool_call>", []),
    (call("f")[: -len("\n</tool_call>")], "", ["f"]),
    ('<tool_call>\n{"name": "f", "argu', '<tool_call>\n{"name": "f", "argu', []),
    ("<tool_call>" + "[" * 5000 + "</tool_call>", "<tool_call>" + "[" * 5000 + "</tool_call>", []),
]


@pytest.mark.parametrize(("text", "content", "names"), CASES)
def test_whole_and_by_character(text: str, content: str, names: list[str]) -> None:
    for pieces in ([text], list(text)):
        parsed = parse(pieces)
        assert (parsed.content, [c.name for c in parsed.calls]) == (content, names)


@settings(max_examples=120, deadline=None)
@given(case=st.sampled_from(CASES[:-1]), cuts=st.lists(st.integers(0, 120), max_size=6))
def test_cut_anywhere(case: tuple[str, str, list[str]], cuts: list[int]) -> None:
    text = case[0]
    points = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    pieces = [text[a:b] for a, b in itertools.pairwise(points)]
    assert parse(pieces) == parse([text])


def test_arguments_are_json_text() -> None:
    assert parse([call("f", a=[1, None], b="ü")]).calls == [ParsedCall("f", '{"a": [1, null], "b": "ü"}')]
    text = '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>'
    assert parse([text]).calls == [ParsedCall("f", '{"a": 1}')]
    assert parse(['<tool_call>{"name": "f"}</tool_call>']).calls == [ParsedCall("f", "{}")]


def test_text_is_shown_as_soon_as_it_is_certain() -> None:
    parser = TOOL_PARSERS.load("hermes")()
    assert parser.push("Hello <") == [Part("content", "Hello")]
    assert parser.push("b>") == [Part("content", " <b>")]
    assert parser.push('<tool_call>{"name": "f", ') == []
    assert parser.push('"arguments": {"a": [1, ') == [Part("call", "f"), Part("arguments", '{"a": [1, ')]
    assert parser.push("2]") == [Part("arguments", "2]")]
    assert parser.push("}}") == [Part("arguments", "}")]


def test_the_template_names_the_parser() -> None:
    assert tool_parser_name("... <tool_call> ...") == "hermes"
    assert tool_parser_name("no tools at all") is None
