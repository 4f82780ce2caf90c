"""Regular expressions of Lark grammars: llguidance, which reads the grammars themselves, is the judge."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest

from app.parsers.lark_expression import MAX_CHARS, NoExpressionError, expression_of
from tests.parsers.test_grammars import accepts, vocabulary

__all__ = ["vocabulary"]
# As coding agents send one for the differences that they take.
CHANGES = r"""
start: begin change+ end
begin: "<<< Changes" LF
end: ">>>" LF?

change: new | gone | moved  // of a file
new: "new " path LF added+
gone: "gone " path LF
moved: "moved " path LF ("to " path LF)? (kept | added)*
path: /(.+)/
added: "+" /(.*)/ LF -> line
kept: (" " | "-") /(.*)/ LF

%import common.LF
"""
GRAMMARS: list[tuple[str, list[str], str]] = [  # with texts of them, and letters to spoil those with
    (
        CHANGES,
        ["<<< Changes\nnew a/b.py\n+x = 1\n+\ngone c\n>>>\n", "<<< Changes\nmoved a\nto b\n x\n+y\n>>>"],
        "+-\n> x",
    ),
    ('start: SUM\nSUM: NUMBER ("+" NUMBER)+\nNUMBER: /[1-9][0-9]?/', ["1+22", "3+4+5"], "+10"),
    ('start: word ("," word)* "\\n"\nword: /[a-c]"{1,3}/', ['a"\n', 'a",b"""\n'], 'a",\n'),
    ('start: a | b\n | c\na: "x"i ~ 2..3\nb: ["y"] "z"\n?c: "0".."9" ~ 2', ["xX", "xXx", "z", "yz", "09"], "xyz09"),
    ('start: /a\\/b/ "/" "(.*)" // a comment\n# another\n', ["a/b/(.*)"], "ab/.*"),
    ("%import common.INT -> N\n%import common.CNAME\nstart: N | CNAME | /k+/i", ["12", "a_1", "kKk"], "1aK_"),
    ('start: "a" |\n', ["a", ""], "a"),
]


@pytest.mark.parametrize(("grammar", "texts", "letters"), GRAMMARS)
def test_the_same_texts(vocabulary: Any, grammar: str, texts: list[str], letters: str) -> None:
    rng, expression = random.Random(1), expression_of(grammar)
    as_expression = "start: TEXT\nTEXT: /" + expression.replace("/", r"\/").replace("\n", r"\n") + "/"
    for text in texts:
        assert accepts(vocabulary, grammar, text)
        assert re.fullmatch(expression, text)
        for _ in range(60):
            at = rng.randrange(len(text) + 1)
            other = text[:at] + rng.choice(letters) * rng.randrange(2) + text[at + rng.randrange(2) :]
            wanted = accepts(vocabulary, grammar, other)
            assert accepts(vocabulary, as_expression, other) == wanted, other
            assert bool(re.fullmatch(expression, other)) == wanted, other


@pytest.mark.parametrize(
    ("grammar", "why"),
    [
        ('start: "(" start ")" | "x"', "'start' leads to itself"),
        ('start: a\na: "x" b\nb: a?', "'a' leads to itself"),
        ("start: a", "does not define 'a'"),
        ('a: "x"', "no rule 'start'"),
        ('start: "x"\nstart: "y"', "defines 'start' twice"),
        ('start: ("x"', "'(' is not closed"),
        ('start: "x")', "stands where nothing can"),
        ('start: * "x"', "stands where nothing can"),
        ('start: "x" .. "a"', "a range goes"),
        ('start: "x" ..', "a range goes"),
        ('start: "\\x41"', "no text in double quotes"),
        ('%ignore " "\nstart: "x"', "'%ignore"),
        ("%import python.NAME\nstart: NAME", "'%import python"),
        ("%import common.\nstart: x", "'%import"),
        ("start: <|eos|>", "is not read here"),
        ('"x"', "belongs to no rule"),
        ("start: " + "(" * 1000 + '"x"' + ")" * 1000, "brackets"),
        ("start: r0\n" + "\n".join(f"r{i}: r{i + 1}" for i in range(1000)) + '\nr1000: "x"', "one within the other"),
    ],
)
def test_what_has_none_is_named(grammar: str, why: str) -> None:
    with pytest.raises(NoExpressionError, match=re.escape(why)):
        expression_of(grammar)


def test_rules_that_double_are_bounded() -> None:
    doubled = "start: r0\n" + "\n".join(f"r{i}: r{i + 1} r{i + 1}" for i in range(60)) + '\nr60: "x"'
    with pytest.raises(NoExpressionError, match=f"more than {MAX_CHARS} characters"):
        expression_of(doubled)
