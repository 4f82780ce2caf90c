"""YAML in which each value carries a comment that says where it came from; it loads back to the same document."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import yaml

from app.cli.configuration import YamlPath

COLUMN = 56  # where comments start, if the value leaves room


def annotate(document: dict[str, Any], origin: Callable[[YamlPath], str]) -> str:
    """`document` as YAML, each value followed by `# origin(place)`."""
    return "\n".join(_lines(document, (), 0, origin)) + "\n"


def _lines(node: Any, place: YamlPath, indent: int, origin: Callable[[YamlPath], str]) -> Iterator[str]:
    """Lines of a mapping or of a list of mappings."""
    pad = " " * indent
    if isinstance(node, list):
        for index, item in enumerate(node):
            first, *rest = _lines(item, (*place, index), indent + 2, origin)
            yield f"{pad}- {first.lstrip()}"
            yield from rest
        return
    for key, value in node.items():
        here = (*place, key)
        if _is_nested(value):
            yield f"{pad}{_scalar(key)}:"
            yield from _lines(value, here, indent + 2, origin)
        else:
            yield f"{f'{pad}{_scalar(key)}: {_scalar(value)}'.ljust(COLUMN)}  # {origin(here)}"


def _is_nested(value: Any) -> bool:
    if isinstance(value, dict):
        return bool(value)
    return isinstance(value, list) and bool(value) and all(isinstance(item, dict) and item for item in value)


def _scalar(value: Any) -> str:
    """A value on one line, also a text of several: between double quotes."""
    style = '"' if isinstance(value, str) and "\n" in value else None
    text: str = yaml.safe_dump(value, default_flow_style=True, default_style=style, width=1 << 20, allow_unicode=True)
    return text.removesuffix("\n").removesuffix("...").strip()
