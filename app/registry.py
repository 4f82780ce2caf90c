"""Lazy `name -> "module:attribute"` tables: a variant of anything is one file and one table line."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

from app.errors import UnsupportedError

T = TypeVar("T")


def suggestion(name: str, known: Iterable[str]) -> str:
    """What to say after an unknown name: the one that was meant if one is spelled alike, else all that exist."""
    names = list(known)
    close = difflib.get_close_matches(name, names, 1)
    return f"did you mean {close[0]}?" if close else f"known: {', '.join(names)}"


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


@dataclass(frozen=True, slots=True)
class OneOf:
    """Metadata of an option's type: a name of `table`, as it is when the option is given, or one of `more`."""

    table: Registry[Any]
    more: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """All choices."""
        return (*self.more, *self.table)

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._check, handler(source))

    def _check(self, name: str) -> str:
        if name not in self.names:
            raise ValueError(f"unknown {self.table.kind} {name!r}; {suggestion(name, self.names)}")
        return name
