"""Command-line options made from pydantic classes: name, type, default and help are declared there and only there.

Values stay as they were typed until the class itself checks them, so that the command line and a YAML accept the same.
"""

from __future__ import annotations

import argparse
import json
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from app.errors import ConfigError
from app.registry import OneOf

Path = tuple[str, ...]
M = TypeVar("M", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class Option:
    """One field of a pydantic class as a flag; `path` is where its value belongs in the configuration."""

    flag: str
    path: Path
    field: FieldInfo

    @property
    def dest(self) -> str:
        """Name in argparse's namespace."""
        return "option:" + ".".join(self.path)


def options_of(model: type[BaseModel], path: Path = (), prefix: str = "", skip: Iterable[str] = ()) -> Iterator[Option]:
    """An option for each field of `model` but those in `skip`; a nested class puts its field's name in front."""
    for name, field in model.model_fields.items():
        if name in skip:
            continue
        nested = field.annotation
        if isinstance(nested, type) and issubclass(nested, BaseModel):
            yield from options_of(nested, (*path, name), f"{prefix}{name}-")
        else:
            yield Option(f"--{prefix}{name}".replace("_", "-"), (*path, name), field)


def add_options(parser: argparse.ArgumentParser, title: str, options: Iterable[Option]) -> None:
    """Add them as a group. An option that is not given leaves no trace in the namespace."""
    group = parser.add_argument_group(title)
    for option in options:
        group.add_argument(option.flag, dest=option.dest, help=_help(option), **_argument(option.field))


def given(args: argparse.Namespace, options: Iterable[Option]) -> dict[Path, Any]:
    """The values that were given, by path."""
    values = vars(args)
    return {option.path: values[option.dest] for option in options if option.dest in values}


def build(model: type[M], values: Mapping[Path, Any], options: Iterable[Option]) -> M:
    """`model` from its fields' values, by the last name of their paths. ConfigError names the flags at fault."""
    try:
        return model.model_validate({path[-1]: value for path, value in values.items()})
    except ValidationError as error:
        flags = {option.path[-1]: option.flag for option in options}
        lines = []
        for detail in error.errors(include_url=False):
            name = str(detail["loc"][0]) if detail["loc"] else ""
            within = "".join(f"{part}: " for part in detail["loc"][1:] if isinstance(part, str))
            note = f" (given: {detail['input']!r})" if name else ""
            reason = detail["msg"].removeprefix("Value error, ")
            lines.append(f"{flags.get(name, name) or 'options'}: {within}{reason}{note}")
        raise ConfigError("\n".join(lines)) from None


def _argument(field: FieldInfo) -> dict[str, Any]:
    """argparse's keywords for a field's type."""
    kinds = _kinds(field.annotation)
    base: dict[str, Any] = {"default": argparse.SUPPRESS}
    if bool in kinds:
        return {**base, "action": argparse.BooleanOptionalAction}
    choices = "|".join(_choices(field))
    containers = [kind for kind in kinds if typing.get_origin(kind) in (tuple, list, set, frozenset)]
    items = [_bare(kind) for kind in typing.get_args(containers[0]) if kind is not ...] if containers else []
    if items and set(items) <= {str, int, float}:
        return {**base, "action": "append", "metavar": choices or _metavar(items[0])}
    if choices:
        return {**base, "metavar": choices}
    if not kinds & {int, float, str}:
        return {**base, "type": _json, "metavar": "JSON"}
    return {**base, "metavar": _metavar(next(kind for kind in (str, float, int) if kind in kinds))}


def _choices(field: FieldInfo) -> list[str]:
    """Returns the words that a field may be, where it takes one of some; empty for any other."""
    literals = [str(v) for kind in _kinds(field.annotation) if typing.get_origin(kind) is Literal
                for v in typing.get_args(kind)]  # fmt: skip
    tables = [each for each in (*field.metadata, *_metadata(field.annotation)) if isinstance(each, OneOf)]
    return literals + [name for table in tables for name in table.names]


def _plugins(field: FieldInfo) -> Iterator[tuple[str, str]]:
    """The choices that other packages bring, and which."""
    for each in (*field.metadata, *_metadata(field.annotation)):
        if isinstance(each, OneOf):
            yield from ((name, str(plugin)) for name in each.table if (plugin := each.table.plugin(name)))


def _metadata(annotation: Any) -> Iterator[Any]:
    """Yields what stands beside the types that a field may have."""
    if typing.get_origin(annotation) is Annotated:
        yield from typing.get_args(annotation)[1:]
    elif typing.get_origin(annotation) in (typing.Union, types.UnionType, tuple):
        for part in typing.get_args(annotation):
            yield from _metadata(part)


def _kinds(annotation: Any) -> set[Any]:
    """The types that a field may have, without their bounds, None aside."""
    annotation = _bare(annotation)
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return {kind for part in typing.get_args(annotation) for kind in _kinds(part)} - {type(None)}
    return {annotation}


def _bare(annotation: Any) -> Any:
    """The type of an Annotated one."""
    return _bare(typing.get_args(annotation)[0]) if typing.get_origin(annotation) is Annotated else annotation


def _metavar(kind: type) -> str:
    return {int: "N", float: "X"}.get(kind, "TEXT")


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise argparse.ArgumentTypeError(f"{text!r:.200} is not JSON: {error}") from None


def _help(option: Option) -> str:
    text, default = option.field.description or "", option.field.default
    if any(typing.get_origin(kind) in (tuple, list, set, frozenset) for kind in _kinds(option.field.annotation)):
        text += " May be given again."
    text += "".join(f" `{name}` is of {package}." for name, package in _plugins(option.field))
    if default is not PydanticUndefined and default not in (None, ()):
        text += f" (default: {default})"
    return text.replace("%", "%%").strip()
