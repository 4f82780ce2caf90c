"""docs/troubleshooting.md: each message stands in the code, and what it advises is an option."""

from __future__ import annotations

import ast
import re
from functools import cache

import pytest

from tests.docs.pages import DOCS, ROOT, codes, rows
from tools.cli_docs import subparsers

PAGE = (DOCS / "troubleshooting.md").read_text()
ROWS = [(cells[-2].strip("`"), cells[-1]) for cells in rows(PAGE)]
GAP = "\0"


@cache
def texts() -> list[str]:
    """Every text of app/, with GAP for what it is filled with."""
    found = []
    for path in sorted((ROOT / "app").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = [part.value if isinstance(part, ast.Constant) else GAP for part in node.values]
                found.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return found


def stands_in_the_code(message: str) -> bool:
    """Whether a text of the code has the message's words in its order, with something filled in at each `...`."""
    pieces = [re.escape(piece) for piece in message.split("...")]
    pattern = re.compile(f"[^{GAP}]*(?:{GAP}[^{GAP}]*)+".join(pieces) + f"(?:{GAP}.*)?", re.DOTALL)
    return any(pattern.fullmatch(text) for text in texts())


@pytest.mark.parametrize("message", [message for message, _ in ROWS])
def test_message_stands_in_the_code(message: str) -> None:
    assert stands_in_the_code(message)


def test_a_message_that_does_not() -> None:
    assert len(ROWS) > 25
    assert not stands_in_the_code("the cache is full: ... blocks")
    assert not stands_in_the_code("no replica of a model can make progress")


def test_advice_names_options() -> None:
    known = {flag for parser in subparsers().values() for flag in parser._option_string_actions}
    flags = [code.split()[0] for _, advice in ROWS for code in codes(advice) if code.startswith("--")]
    assert flags
    assert set(flags) <= known
