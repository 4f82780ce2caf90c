"""Lazy `name -> "module:attribute"` tables: a variant of anything is one file and one table line, or a plugin.

Plugins are what other packages bring (app/plugins.py), for the tables that have a group of them.
"""

from __future__ import annotations

import difflib
import importlib
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any, Generic, TypeVar

from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

from app.errors import ConfigError, UnsupportedError
from app.plugins import ALLOWED_VARIABLE, Plugin, PluginGroup, not_allowed, usable

T = TypeVar("T")


def suggestion(name: str, known: Iterable[str]) -> str:
    """Returns what to say after an unknown name: the one that was meant if one is spelled alike, else all that
    exist."""
    names = list(known)
    close = difflib.get_close_matches(name, names, 1)
    return f"did you mean {close[0]}?" if close else f"known: {', '.join(names)}"


@cache
def _imported(target: str) -> tuple[ModuleType, str]:
    """The module of "module:attribute", and the attribute's name: steps on a CPU look a table up in every layer, where
    an import costs as much as an operation."""
    module, _, attribute = target.partition(":")
    return importlib.import_module(module), attribute


def load_entry(target: str) -> Any:
    """The object that "module:attribute" names, imported now."""
    module, attribute = _imported(target)
    if sys.modules.get(module.__name__) is not module:
        _imported.cache_clear()  # it has been imported anew since
        module, attribute = _imported(target)
    return getattr(module, attribute)


class Registry(Generic[T]):
    """Looks a name up and imports its target only then, so an unused variant costs nothing. Ours come before plugins,
    which cannot hide them."""

    def __init__(self, kind: str, table: Mapping[str, str], plugins: PluginGroup | None = None) -> None:
        self.kind = kind
        self.plugins = plugins
        self._table = dict(table)

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    @property
    def names(self) -> tuple[str, ...]:
        """All of them, ours first."""
        return (*self._table, *self._plugins())

    def __contains__(self, name: str) -> bool:
        return name in self._table or name in self._plugins()

    def load(self, name: str) -> T:
        """Return the object registered under `name`. UnsupportedError lists what exists, ConfigError names the package
        of a plugin that is broken."""
        target = self._table.get(name)
        if target is None:
            return self._load_plugin(name)
        loaded: T = load_entry(target)
        return loaded

    def plugin(self, name: str) -> Plugin | None:
        """The plugin of that name; None for one of ours, and for an unknown one."""
        return self._plugins().get(name, (None,))[0]

    def withheld(self, name: str) -> str | None:
        """Why a name that is installed may not be used; None of any other."""
        plugin = None if self.plugins is None or name in self else not_allowed(self.plugins.name, name)
        if plugin is None:
            return None
        return f"{self.kind} {name!r} is of {plugin}, which {ALLOWED_VARIABLE} does not name"

    def unknown(self, name: str, known: Iterable[str]) -> str:
        """Returns what to say of a name that is not in the table."""
        return self.withheld(name) or f"unknown {self.kind} {name!r}; {suggestion(name, known)}"

    def _plugins(self) -> dict[str, tuple[Plugin, ...]]:
        return {} if self.plugins is None else usable(self.plugins.name, self.kind, self._table)

    def _load_plugin(self, name: str) -> T:
        found = self._plugins().get(name, ())
        if not found or self.plugins is None:
            known = ", ".join(sorted(self))
            raise UnsupportedError(self.withheld(name) or f"unknown {self.kind} {name!r}; known: {known}")
        if len(found) > 1:
            packages = " and of ".join(map(str, found))
            raise ConfigError(
                f"{self.kind} {name!r} is of {packages}: uninstall one, or leave it out of {ALLOWED_VARIABLE}"
            )
        loaded: T = found[0].load_checked(self.kind, self.plugins)
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
        if name not in self.more and name not in self.table:
            raise ValueError(self.table.unknown(name, self.names))
        return name
