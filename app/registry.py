"""Lazy `name -> "module:attribute"` tables: a variant of anything is one file and one table line."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from typing import Generic, TypeVar

from app.errors import UnsupportedError

T = TypeVar("T")


class Registry(Generic[T]):
    """Looks a name up and imports its target only then, so an unused variant costs nothing."""

    def __init__(self, kind: str, table: Mapping[str, str]) -> None:
        self.kind = kind
        self._table = dict(table)

    def __iter__(self) -> Iterator[str]:
        return iter(self._table)

    def __contains__(self, name: str) -> bool:
        return name in self._table

    def load(self, name: str) -> T:
        """Return the object registered under `name`; UnsupportedError lists what exists."""
        target = self._table.get(name)
        if target is None:
            raise UnsupportedError(f"unknown {self.kind} {name!r}; known: {', '.join(sorted(self._table))}")
        module, _, attribute = target.partition(":")
        loaded: T = getattr(importlib.import_module(module), attribute)
        return loaded
