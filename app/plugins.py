"""Plugins: variants that other installed packages bring, as entry points of their metadata (PyPA's specification).

A package's metadata is read, by every process for itself, and nothing of it is imported before one of its names is
asked for. `MANTA_PLUGINS` holds the packages that may be asked, separated by commas or spaces; without it all may.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from app.errors import ConfigError

ALLOWED_VARIABLE = "MANTA_PLUGINS"
PREFIX = "manta."  # of the groups' names in a package's metadata
MAX_REASON_CHARS = 500  # of what an import that failed says

logger = logging.getLogger("manta.plugins")


@dataclass(frozen=True, slots=True)
class PluginGroup:
    """One kind of plugin: the group of its entry points, and what they are to name."""

    name: str  # without the prefix
    contract: str  # "module:class" of ours: plugins are subclasses of it
    are_instances: bool = False  # ... or instances


@dataclass(frozen=True, slots=True)
class Plugin:
    """One entry point of an installed package."""

    group: str
    name: str
    package: str  # its distribution's name
    version: str
    entry: EntryPoint

    def __str__(self) -> str:
        return f"package {self.package} {self.version} ({self.entry.value})"

    @property
    def is_allowed(self) -> bool:
        """True if MANTA_PLUGINS lets its package take part."""
        given = os.environ.get(ALLOWED_VARIABLE)
        if given is None:
            return True
        return _normal(self.package) in {_normal(name) for name in re.split(r"[,\s]+", given) if name}

    def load(self, kind: str) -> Any:
        """Import what it names. ConfigError, in one line, where its package is broken."""
        try:
            return self.entry.load()
        except (Exception, SystemExit) as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:MAX_REASON_CHARS]
            raise ConfigError(f"{kind} {self.name!r} of {self} cannot be loaded: {reason}") from error

    def load_checked(self, kind: str, group: PluginGroup) -> Any:
        """Import what it names, which must keep the group's contract; else ConfigError."""
        loaded = self.load(kind)
        if fault := _fault(loaded, group):
            raise ConfigError(f"{kind} {self.name!r} of {self} {fault}")
        return loaded


@cache
def installed(group: str) -> tuple[Plugin, ...]:
    """All plugins of a group, allowed or not, in the order of their names and packages. Read once in a process."""
    found = [_plugin(group, entry) for entry in entry_points(group=PREFIX + group)]
    return tuple(sorted(found, key=lambda plugin: (plugin.name, plugin.package)))


def all_installed() -> tuple[Plugin, ...]:
    """Those of all groups."""
    groups = sorted(group for group in entry_points().groups if group.startswith(PREFIX))
    return tuple(plugin for group in groups for plugin in installed(group.removeprefix(PREFIX)))


def usable(group: str, kind: str, built_in: Mapping[str, Any]) -> dict[str, tuple[Plugin, ...]]:
    """The allowed ones by name, without those that would hide one of ours."""
    by_name: dict[str, tuple[Plugin, ...]] = {}
    for plugin in installed(group):
        if plugin.is_allowed and plugin.name in built_in:
            _say_hidden(plugin, kind)
        elif plugin.is_allowed:
            by_name[plugin.name] = (*by_name.get(plugin.name, ()), plugin)
    return by_name


def not_allowed(group: str, name: str) -> Plugin | None:
    """The plugin of that name that is installed but may not take part."""
    return next((each for each in installed(group) if each.name == name and not each.is_allowed), None)


@cache
def _say_hidden(plugin: Plugin, kind: str) -> None:
    logger.warning("%s %r of %s is left out: Manta has one of that name itself", kind, plugin.name, plugin)


def _plugin(group: str, entry: EntryPoint) -> Plugin:
    dist = entry.dist
    name, version = ("unknown", "") if dist is None else (dist.name, dist.version)
    return Plugin(group, entry.name, name, version, entry)


def _normal(name: str) -> str:
    """A distribution's name as PyPA compares them."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _fault(loaded: Any, group: PluginGroup) -> str:
    """Why something is not what its group asks for; empty where it is."""
    module, _, attribute = group.contract.partition(":")
    contract: type = getattr(import_module(module), attribute)
    if group.are_instances:
        return "" if isinstance(loaded, contract) else f"is not an instance of {module}.{attribute}"
    if not isinstance(loaded, type) or not issubclass(loaded, contract):
        return f"is not a subclass of {module}.{attribute}"
    missing = list(_abstract(loaded))
    return f"does not define {', '.join(missing)} of {module}.{attribute}" if missing else ""


def _abstract(kind: type) -> Iterator[str]:
    """Methods that a class still has to define."""
    for name in dir(kind):
        if getattr(getattr(kind, name, None), "__isabstractmethod__", False):
            yield name
