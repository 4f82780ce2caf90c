"""The words are the field's (docs/design.md, section 4): private ones stay out of identifiers and prose alike."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# A private word -> the field's word. Identifiers are taken apart: InFlightLetter holds "letter".
WORDS = {
    "letter": "step message",
    "gang": "worker group",
    "thought": "reasoning",
    "door": "API layer, or entry",
    "rehearse": "warm up",
    "rehearsal": "warm-up",
    "reconciler": "output updater",
    "outbox": "pending diffs",
    "ticket": "generation of a row",
    "careful": "slow path",
    "carefully": "on the slow path",
    "lane": "stream",
    "soften": "online softmax",
    "seat": "group slot",
    "wish": "output option",
    "meeting": "rendezvous",
    "shelf": "store",
    "likeliest": "most likely",
}
# Names of classes and functions; in prose their words may be what they are to everybody.
IDENTIFIERS = {
    "RollCall": "Discovery",
    "LateNorm": "DeferredNorm",
    "Offer": "ToolOptions",
    "StreamWishes": "OutputOptions",
    "ResponseHead": "ResponseEnvelope",
    "Closed": "StrictModel",
    "GrammarTrial": "SandboxedCompile",
    "fold_tile": "kv_iteration",
    "needs_care": "needs_slow_path",
}
# Where such a word is the right one: file -> the very text.
ALLOWED = {
    "app/parsers/lark_expression.py": ["LETTER"],  # names of Lark's
    "app/api/pages/style.css": ["letter-spacing"],
    "app/api/pages/view.js": ['"Thought"'],  # what readers of chats know as a label
    "app/parsers/mistral.py": ["letters and digits", "ascii_letters"],
    "app/cli/bench/workload.py": ["ferry brings letters", "northern shelf"],
    "app/structured/markers.py": ["in letters"],
    "app/structured/patterns.py": ["letters"],
    "benchmarks/structured.py": ["LETTERS"],
    "loadtest/prompts.py": ['"door"'],
}
PLACES = ("app", "benchmarks", "configs", "docs", "examples", "loadtest", "README.md", "CONTRIBUTING.md")
SUFFIXES = {".py", ".md", ".yaml", ".js", ".css", ".html"}
OTHERS_TEXT = ("app/assets/", "app/api/pages/vendor/", "docs/loadtest-64-users.html")
PIECE = re.compile(r"[A-Z]?[a-z]+|[A-Z]+")
NAME = re.compile(r"[A-Za-z_]\w*")
HEADLESS = re.compile(r"(Of|For|As|By|To|With|Besides|About) ")
VERBLESS = re.compile(r"(What|Which|Whether|Whose|Who|Where|How|Of)\b")


def files() -> Iterator[tuple[str, str]]:
    """(path from the root, text) of everything that a reader of the code or the documentation meets."""
    for place in map(ROOT.joinpath, PLACES):
        for path in [place] if place.is_file() else sorted(place.rglob("*")):
            name = path.relative_to(ROOT).as_posix()
            if path.suffix in SUFFIXES and path.is_file() and not name.startswith(OTHERS_TEXT):
                yield name, path.read_text(encoding="utf-8")


def private_words(text: str, with_classes: bool = True) -> Iterator[tuple[str, str]]:
    """(the private word as it stands there, the field's word)."""
    for name in NAME.findall(text):
        if with_classes and name in IDENTIFIERS:
            yield name, IDENTIFIERS[name]
        for piece in PIECE.findall(name):
            word = piece.lower()
            for form in (word, word.removesuffix("s"), word.removesuffix("es")):
                if form in WORDS:
                    yield name, WORDS[form]
                    break


def openings(source: str) -> Iterator[tuple[int, str]]:
    """(line, text) of each docstring, comment and group of comment lines of a Python file."""
    previous, last_comment = tokenize.NEWLINE, -1
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            if token.start[0] != last_comment + 1:
                yield token.start[0], token.string.lstrip("# ")
            last_comment = token.start[0] if token.line.lstrip().startswith("#") else -1
        elif token.type == tokenize.STRING and previous in (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT):
            yield token.start[0], token.string.strip("\"' \n")
        if token.type not in (tokenize.NL, tokenize.COMMENT):
            previous = token.type


def verbless(source: str) -> list[str]:
    """The docstrings of a Python file that begin with a question word, so that their first sentence has no verb."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    texts = [ast.get_docstring(node) or "" for node in ast.walk(ast.parse(source)) if isinstance(node, documented)]
    return [text for text in texts if VERBLESS.match(text)]


def test_no_private_words() -> None:
    found = []
    for name, text in files():
        for allowed in ALLOWED.get(name, ()):
            assert allowed in text, f"{name} no longer says {allowed!r}"
            text = text.replace(allowed, "")
        words = private_words(text, with_classes=name.startswith("app/") and name.endswith(".py"))
        found += [f"{name}: {word!r}: say {instead!r}" for word, instead in words]
    assert not found, "\n".join(found)


def test_comments_begin_with_their_noun() -> None:
    headless = [
        f"{name}:{line}: {text[:60]!r}"
        for name, source in files()
        if name.endswith(".py")
        for line, text in openings(source)
        if HEADLESS.match(text)
    ]
    assert not headless, "\n".join(headless)


def test_docstrings_say_what_a_thing_does() -> None:
    found = [
        f"{name}: {text[:60]!r}: say what it does or is, with a verb"
        for name, source in files()
        if name.startswith("app/") and name.endswith(".py")
        for text in verbless(source)
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("class InFlightLetter:", ["InFlightLetter"]),
        ("two letters in flight", ["letters"]),
        ("self._gang = Gang(ranks)", ["_gang", "Gang"]),
        ("shows_thoughts and end_of_thought", ["shows_thoughts", "end_of_thought"]),
        ("a planet, a plane and a ticketed outdoor seating", []),
        ("from app import Closed, closed", ["Closed"]),
    ],
)
def test_a_private_word_is_found_in_any_form(text: str, says: list[str]) -> None:
    assert [word for word, _ in private_words(text)] == says


def test_a_headless_comment_is_found() -> None:
    source = 'def f():\n    """Of no rows."""\n    x = 1  # Of a line\n    # For a reader\n    # of two lines\n'
    assert [line for line, text in openings(source) if HEADLESS.match(text)] == [2, 3, 4]


def test_a_docstring_without_a_verb_is_found_wherever_it_stands() -> None:
    source = '''"""Whose turn it is."""

class Turn:
    """Howling is no question."""

    async def take(self):
        """
        What comes next.
        """
        def of_tenant():
            """Keeps what is left."""
'''
    assert verbless(source) == ["Whose turn it is.", "What comes next."]
