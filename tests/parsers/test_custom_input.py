"""The input of custom tools: out of JSON in pieces (the json module is the judge), and its grammar in every format."""

from __future__ import annotations

import json
import random
import re

import pytest

from app.parser_tables import TOOL_PARSERS
from app.parsers.custom_input import CustomInputs, InputGrammar, InputReader, enforced_schema, input_schema
from app.parsers.grammar import Lark
from app.parsers.scanner import Part
from tests.parsers.test_grammars import accepts, vocabulary

__all__ = ["vocabulary"]
TEXTS = ["", "plain", 'a "quote" \\ and\n\ttabs', "Grüße 🙂 東京", "\x00\x1f", "\\u0041 \\n", "}{", "🙂" * 5]
# Rust's and Python's syntax alike; each with a text that matches and one that does not.
REGEXES = [
    (r"^\d{2}/[a-z]+$", "12/ab", "12/ab "),
    (r'say "[^"]*"\\?', 'say "hi"\\', "say hi"),
    (r"(?P<a>x|y)\$", "x$", "x"),
    ("a\nb", "a\nb", "a b"),
    (r"^a|b$", "b", "ab"),
]


def read(text: str, rng: random.Random) -> str:
    reader, said = InputReader(), ""
    while text:
        size = rng.randint(1, 5)
        said, text = said + reader.push(text[:size]), text[size:]
    return said + reader.finish()


@pytest.mark.parametrize("is_ascii", [False, True])
def test_the_string_comes_out_of_json_in_pieces(is_ascii: bool) -> None:
    rng = random.Random(3)
    for text in TEXTS:
        arguments = json.dumps({"input": text}, ensure_ascii=is_ascii)
        for _ in range(20):
            assert read(arguments, rng) == text


def test_what_is_sure_is_not_held() -> None:
    reader = InputReader()
    assert [reader.push(piece) for piece in ('{"inp', 'ut": "a', "b\\", "nc\\ud83d", "\\ude42", 'd"', "}")] == [
        *("", "a", "b", "\nc", "🙂", "d", "")
    ]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ('{"input": "cut off', "cut off"),
        ('{"input": "cut \\u00', "cut "),
        ('{"input": "half \\ud83d"}', "half \ufffd"),
        ('{"input": "half \\ud83d and \\ude42 \\ud83d', "half \ufffd and \ufffd \ufffd"),
        ('{"input": "no escape: \\d \\uzz"}', "no escape: \\d \\uzz"),
        ('{"other": 1, "input": "late"}', "late"),
        ('"bare"', "bare"),
        ("{" + " " * 1000 + '"input": "far"}', "far"),
        ('{"query": "x"}', '{"query": "x"}'),
        ("{broken", "{broken"),
        ("{}", "{}"),
    ],
)
def test_what_models_write_besides(arguments: str, said: str) -> None:
    for seed in range(10):
        found = read(arguments, random.Random(seed))
        assert found == said
        found.encode()


def test_other_calls_pass() -> None:
    inputs = CustomInputs({"run"})
    parts = [Part("call", "run"), Part("arguments", '{"q": 1'), Part("call", "f"), Part("arguments", '{"input": "a"}')]
    found = inputs.push([*parts, Part("content", "!"), Part("call", "run"), Part("arguments", '{"input": "b')])
    expected = [("call", "run"), ("arguments", '{"q": 1'), ("call", "f"), ("arguments", '{"input": "a"}')]
    assert [(part.kind, part.text) for part in found] == [
        *expected, ("content", "!"), ("call", "run"), ("arguments", "b")
    ]  # fmt: skip
    assert inputs.flush() == []


@pytest.mark.parametrize("name", ["qwen3_coder", "glm45", "glm47", "seed_oss", "minimax_m2", "hermes", "pythonic"])
def test_regular_expressions_in_every_form(name: str, vocabulary: object) -> None:
    parser = TOOL_PARSERS.load(name)
    for pattern, good, bad in REGEXES:
        grammar = InputGrammar("regex", pattern)
        lark = Lark({}, {"run": grammar.lark()})
        text = lark.finish(parser.call_grammar(()).required(lark, {"run": enforced_schema(grammar)}, parallel=False))
        for said, is_right in ((good, True), (bad, False)):
            assert accepts(vocabulary, text, call_of(name, said)) == is_right, (pattern, said)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["hermes", "pythonic"])
def test_a_lark_grammar_where_calls_hold_json(name: str, vocabulary: object) -> None:
    """Through the escapes of JSON; the model is shown the grammar, not what was made of it."""
    grammar = InputGrammar("lark", 'start: line+\nline: "\\"" /[^"\\n]*/ "\\"" "\\n"')
    lark = Lark({}, {"run": grammar.lark()})
    text = lark.finish(
        TOOL_PARSERS.load(name).call_grammar(()).required(lark, {"run": enforced_schema(grammar)}, False)
    )
    for said, is_right in (('"a"\n', True), ('"é\\"\n""\n', True), ('"a"', False), ("a\n", False), ("", False)):
        assert accepts(vocabulary, text, call_of(name, said)) == is_right, said  # type: ignore[arg-type]
    assert "pattern" not in str(input_schema(grammar))


def call_of(name: str, said: str) -> str:
    """A call of `run` as the format's models write it."""
    as_json, as_string = (json.dumps(value, ensure_ascii=False) for value in ({"input": said}, said))
    inside, lines = (f"<parameter=input>{edge}{said}{edge}</parameter>" for edge in ("", "\n"))
    closed = "</parameter>\n</invoke>\n</minimax:tool_call>"
    return {
        "qwen3_coder": f"<tool_call>\n<function=run>\n{lines}\n</function>\n</tool_call>",
        "seed_oss": f"<seed:tool_call>\n<function=run>\n{inside}\n</function>\n</seed:tool_call>",
        "minimax_m2": f'<minimax:tool_call>\n<invoke name="run">\n<parameter name="input">{said}{closed}',
        "glm45": f"<tool_call>run\n<arg_key>input</arg_key>\n<arg_value>{said}</arg_value>\n</tool_call>",
        "glm47": f"<tool_call>run<arg_key>input</arg_key><arg_value>{said}</arg_value></tool_call>",
        "hermes": f'<tool_call>\n{{"name": "run", "arguments": {as_json}}}\n</tool_call>',
        "pythonic": f"[run(input={as_string})]",
    }[name]


def test_a_lark_grammar_where_calls_hold_text(vocabulary: object) -> None:
    """With rules of names that ours have too, imports and white space that is ignored."""
    definition = '%import common.INT\n%ignore " "\nstart: r0 ("," r0)*\nr0: INT "{" | /<[a-z]+>/\n'
    for name in ("qwen3_coder", "glm45", "glm47", "seed_oss", "minimax_m2"):
        grammar = InputGrammar("lark", definition)
        lark = Lark({}, {"run": grammar.lark()})
        offered = {
            "run": input_schema(grammar),
            "other": {"type": "object", "properties": {"input": {"type": "string"}}},
        }
        text = lark.finish(TOOL_PARSERS.load(name).call_grammar(()).required(lark, offered, parallel=False))
        for said in ("12{", "12 {, <ab>, 3{", "<parameter>"):
            assert accepts(vocabulary, text, call_of(name, said)), (name, said)  # type: ignore[arg-type]
        for said in ("", "12", "x", "</parameter>"):
            assert not accepts(vocabulary, text, call_of(name, said)), (name, said)  # type: ignore[arg-type]
        other = re.sub(r"\brun\b", "other", call_of(name, "any text"))
        assert accepts(vocabulary, text, other)  # type: ignore[arg-type]
