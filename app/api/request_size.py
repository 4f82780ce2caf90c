"""How large what a client sent is, without reading it all: an estimate of the work that it makes."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

NODE_CHARS = 16  # a number, a name's own overhead, an empty list: as much work as so many characters
ENOUGH_CHARS = 1 << 17  # what is larger than that is large, and not measured further


def size_of(value: Any, enough: int = ENOUGH_CHARS) -> int:
    """Characters of all texts in nested lists, objects and models, and something for each of their nodes; exact up to
    `enough`, above which counting stops."""
    found, open_values = 0, [value]
    while open_values and found <= enough:
        one = open_values.pop()
        found += NODE_CHARS
        if isinstance(one, str):
            found += len(one)
        elif isinstance(one, BaseModel):
            open_values += one.__dict__.values()
        elif isinstance(one, dict):
            open_values += one.keys()
            open_values += one.values()
        elif isinstance(one, list | tuple):
            open_values += one
    return found
