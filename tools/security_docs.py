"""Writes the table of published weaknesses into docs/security.md, from tools/advisories.py.

python -m tools.security_docs           # rewrite the table
python -m tools.security_docs --check   # exit 1 when it is stale
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from tools.advisories import KINDS, Advisory
from tools.markdown import cell, table

PAGE = Path(__file__).resolve().parent.parent / "docs" / "security.md"
BEGIN, END = "<!-- advisories: written by python -m tools.security_docs -->", "<!-- end of advisories -->"
HEAD = ("ids", "there", "here", "test")


def page() -> str:
    """The text of docs/security.md, with the table as it should be."""
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{chr(10).join(_tables())}\n\n{END}{after}"


def _tables() -> Iterator[str]:
    for number, kind in enumerate(KINDS):
        yield from ([""] if number else [])
        yield f"### {kind.name}\n"
        yield from table(HEAD, map(_row, kind.advisories))


def _row(advisory: Advisory) -> list[str]:
    tests = "; ".join(f"`{test}`" for test in advisory.tests) or "cannot apply"
    there = f"{advisory.product}: {advisory.there}"
    return [_short(advisory.ids), *map(cell, (there, advisory.here, tests))]


def _short(ids: tuple[str, ...]) -> str:
    """The ids on few lines: what an id shares with the one before it is left out."""
    shown: list[str] = []
    before = ""
    for name in ids:
        head, _, tail = name.rpartition("-")
        shown.append(f"-{tail}" if head == before else name)
        before = head
    return ", ".join(shown)


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only say whether the page is fresh")
    fresh = page()
    if parser.parse_args().check:
        return int(PAGE.read_text(encoding="utf-8") != fresh)
    PAGE.write_text(fresh, encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
