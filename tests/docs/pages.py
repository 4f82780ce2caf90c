"""The pages a reader meets, and what stands in them: fenced blocks, inline code, links, tables."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
DOCS = ROOT / "docs"
PAGES = [
    *sorted(DOCS.glob("*.md")),
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "benchmarks/RESULTS.md", "examples/README.md")),
    *sorted((ROOT / "benchmarks/history").glob("*.md")),
]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
CODE = re.compile(r"`([^`\n]+)`")


def name_of(path: Path) -> str:
    """A page's path from the root, for the names of tests."""
    return path.relative_to(ROOT).as_posix()


def blocks(text: str, *languages: str) -> list[str]:
    """The fenced blocks of some languages; "" is a fence without one."""
    return [body for language, body in FENCE.findall(text) if language in languages]


def prose(text: str) -> str:
    """What is in no fence."""
    return FENCE.sub("", text)


def section(text: str, heading: str) -> str:
    """The text below a heading of the second level."""
    return text.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]


def rows(text: str) -> Iterator[list[str]]:
    """The cells of each row of all tables, heads aside."""
    lines = text.splitlines()
    for number, line in enumerate(lines):
        if line.startswith("| ") and not "".join(lines[number + 1 : number + 2]).startswith("|---"):
            yield [cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip()[1:-1])]


def codes(text: str) -> list[str]:
    """The inline code of a text."""
    return CODE.findall(text)


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings, by GitHub's rule."""
    headings = re.findall(r"^#+ (.+)$", prose(text), re.MULTILINE)
    plain = [re.sub(r"[^\w\- ]", "", LINK.sub(r"\1", heading).lower()).strip() for heading in headings]
    return {heading.replace(" ", "-") for heading in plain}
