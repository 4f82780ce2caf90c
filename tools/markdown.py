"""Pieces of generated Markdown pages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a table."""
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return lines + ["| " + " | ".join(row) + " |" for row in rows]


def cell(text: str) -> str:
    """`text` on one line, safe within a table."""
    return " ".join(text.replace("|", "\\|").split())
