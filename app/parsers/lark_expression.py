"""Turns Lark grammars without recursion into one regular expression, of the same texts.

A model that writes the arguments of calls as JSON escapes the text: an expression can be enforced through the escapes,
a grammar cannot.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache

MAX_CHARS = 16_384  # of the expression: a rule stands in it as often as it is named
MAX_DEPTH = 64  # rules and brackets within another
_TOKEN = re.compile(
    r"""(?P<skip>\s+|//[^\n]*|\#[^\n]*)
    |(?P<text>"(?:\\.|[^"\\\n])*"i?)
    |(?P<regex>/(?:\\.|[^/\\\n])+/[imslux]*)
    |(?P<head>[?!]*\w+(?:\.-?\d+)?\s*:)
    |(?P<command>%\w+)
    |(?P<times>~\s*\d+(?:\s*\.\.\s*\d+)?)
    |(?P<alias>->\s*\w+)
    |(?P<range>\.\.)
    |(?P<name>[A-Za-z_]\w*)
    |(?P<mark>[()\[\]|?*+.,])""",
    re.VERBOSE,
)
_SPECIAL = re.compile(r"[\\.+*?()|\[\]{}^$#&~-]")
_FLAGS = "imsx"  # others are of Python
# What `%import common.NAME` brings.
_COMMON: Mapping[str, str] = {
    "DIGIT": "[0-9]",
    "HEXDIGIT": "[a-fA-F0-9]",
    "INT": "[0-9]+",
    "SIGNED_INT": "[+-]?[0-9]+",
    "DECIMAL": r"[0-9]+\.[0-9]*|\.[0-9]+",
    "NUMBER": r"[0-9]+|(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?|[0-9]+[eE][+-]?[0-9]+",
    "LCASE_LETTER": "[a-z]",
    "UCASE_LETTER": "[A-Z]",
    "LETTER": "[A-Za-z]",
    "WORD": "[A-Za-z]+",
    "CNAME": "[A-Za-z_][A-Za-z0-9_]*",
    "WS_INLINE": "[ \t]+",
    "WS": r"[ \t\f\r\n]+",
    "CR": r"\r",
    "LF": r"\n",
    "NEWLINE": r"(?:\r?\n)+",
}


class NoExpressionError(Exception):
    """The grammar has no such expression, or it is not read here; the message says why."""


@lru_cache(maxsize=64)
def expression_of(definition: str) -> str:
    """The expression that the texts of a Lark grammar match as a whole."""
    rules = _rules(definition)
    if "start" not in rules:
        raise NoExpressionError("it has no rule 'start'")
    return _Writer(rules).rule("start", ())


@dataclass(slots=True, frozen=True)
class _Token:
    kind: str
    text: str


@dataclass(slots=True)
class _Rule:
    """The right side of a rule, as it is written."""

    tokens: list[_Token] = field(default_factory=list)


def _tokens(definition: str) -> Iterator[_Token]:
    at = 0
    while at < len(definition):
        found = _TOKEN.match(definition, at)
        if found is None:
            raise NoExpressionError(f"{definition[at : at + 20]!r} is not read here")
        at = found.end()
        assert found.lastgroup is not None
        if found.lastgroup != "skip":
            yield _Token(found.lastgroup, found.group())


def _rules(definition: str) -> dict[str, str | _Rule]:
    """Right sides by name; those of imported terminals are expressions."""
    rules: dict[str, str | _Rule] = {}
    current: _Rule | None = None
    tokens = list(_tokens(definition))
    i = 0
    while i < len(tokens):
        token = tokens[i]
        i += 1
        if token.kind == "head":
            name = re.sub(r"^[?!]*|(\.-?\d+)?\s*:$", "", token.text)
            if name in rules:
                raise NoExpressionError(f"it defines {name!r} twice")
            rules[name] = current = _Rule()
        elif token.kind == "command":
            i, name, expression = _import(tokens, i, token.text)
            rules[name], current = expression, None
        elif current is None:
            raise NoExpressionError(f"{token.text[:20]!r} belongs to no rule")
        else:
            current.tokens.append(token)
    return rules


def _import(tokens: list[_Token], i: int, command: str) -> tuple[int, str, str]:
    """Reads an import: the place behind it, its name and its expression."""
    words = [token.text for token in tokens[i : i + 3]]
    if command != "%import" or words[:2] != ["common", "."] or len(words) < 3 or words[2] not in _COMMON:
        raise NoExpressionError(f"{' '.join([command, *words])[:60]!r} is not read here")
    i, name = i + 3, words[2]
    if i < len(tokens) and tokens[i].kind == "alias":
        name = tokens[i].text.removeprefix("->").strip()
        i += 1
    return i, name, f"(?:{_COMMON[words[-1]]})"


class _Writer:
    """Writes the expression, rule within rule."""

    def __init__(self, rules: Mapping[str, str | _Rule]) -> None:
        self._rules = rules
        self._written: dict[str, str] = {}

    def rule(self, name: str, above: tuple[str, ...]) -> str:
        """That of one rule, inside of those `above`."""
        if name in above:
            raise NoExpressionError(f"its rule {name!r} leads to itself")
        if len(above) >= MAX_DEPTH:
            raise NoExpressionError(f"its rules lead to more than {MAX_DEPTH} others, one within the other")
        if name not in self._written:
            found = self._rules.get(name)
            if found is None:
                raise NoExpressionError(f"it does not define {name!r}")
            if not isinstance(found, str):
                found = _Reader(found.tokens, lambda inner: self.rule(inner, (*above, name))).read()
            self._written[name] = found
        return self._written[name]


class _Reader:
    """Reads one right side from its begin."""

    def __init__(self, tokens: list[_Token], expression_of_rule: Callable[[str], str]) -> None:
        self._tokens, self._rule = tokens, expression_of_rule
        self._at = 0
        self._depth = 0

    def read(self) -> str:
        """The whole of it."""
        found = self._choices()
        if self._at < len(self._tokens):
            raise NoExpressionError(f"{self._tokens[self._at].text[:20]!r} stands where nothing can")
        return found

    def _choices(self) -> str:
        choices = [self._sequence()]
        while self._take("|"):
            choices.append(self._sequence())
        return _bounded("(?:" + "|".join(choices) + ")")

    def _sequence(self) -> str:
        parts = []
        while self._at < len(self._tokens) and self._tokens[self._at].text not in ("|", ")", "]"):
            if self._tokens[self._at].kind == "alias":
                self._at += 1  # the name of a branch of the tree
                break
            parts.append(self._repeated())
        return _bounded("".join(parts))

    def _repeated(self) -> str:
        found = self._atom()
        while self._at < len(self._tokens):
            token = self._tokens[self._at]
            if token.kind == "times":
                found += "{" + re.sub(r"[~\s]", "", token.text).replace("..", ",") + "}"
            elif token.text in ("?", "*", "+"):
                found += token.text
            else:
                break
            found = f"(?:{found})"
            self._at += 1
        return found

    def _atom(self) -> str:
        token = self._tokens[self._at]
        self._at += 1
        if token.text in ("(", "["):
            return self._bracket(token.text)
        if token.kind == "text":
            return self._text(token.text)
        if token.kind == "regex":
            return _regex(token.text)
        if token.kind == "name":
            return self._rule(token.text)
        raise NoExpressionError(f"{token.text[:20]!r} stands where nothing can")

    def _bracket(self, opening: str) -> str:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise NoExpressionError(f"it has more than {MAX_DEPTH} brackets, one within the other")
        found = self._choices()
        if not self._take(")" if opening == "(" else "]"):
            raise NoExpressionError(f"a {opening!r} is not closed")
        self._depth -= 1
        return found if opening == "(" else f"{found}?"

    def _text(self, literal: str) -> str:
        said = _said(literal.removesuffix("i"))
        if not self._take(".."):
            escaped = _escaped(said)
            return f"(?i:{escaped})" if literal.endswith("i") else f"(?:{escaped})"
        last = _said(self._tokens[self._at].text) if self._at < len(self._tokens) else ""
        self._at += 1
        if len(said) != 1 or len(last) != 1 or said > last:
            raise NoExpressionError("a range goes from one character to a later one")
        return f"[{_escaped(said)}-{_escaped(last)}]"

    def _take(self, text: str) -> bool:
        if self._at == len(self._tokens) or self._tokens[self._at].text != text:
            return False
        self._at += 1
        return True


def _said(literal: str) -> str:
    try:
        said = json.loads(literal, strict=False)
    except ValueError:
        said = None
    if not isinstance(said, str):
        raise NoExpressionError(f"{literal[:20]!r} is no text in double quotes, with the escapes of JSON")
    return said


def _escaped(said: str) -> str:
    return _SPECIAL.sub(lambda found: "\\" + found.group(), said)


def _regex(literal: str) -> str:
    pattern, _, flags = literal[1:].rpartition("/")
    pattern = re.sub(r"\\(.)", lambda found: "/" if found[1] == "/" else found[0], pattern)
    kept = "".join(flag for flag in _FLAGS if flag in flags)
    return f"(?{kept}:{pattern})" if kept else f"(?:{pattern})"


def _bounded(expression: str) -> str:
    if len(expression) > MAX_CHARS:
        raise NoExpressionError(f"it makes an expression of more than {MAX_CHARS} characters")
    return expression
