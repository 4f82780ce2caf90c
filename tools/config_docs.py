"""The page of all options of a configuration, made from the classes of app/config/: `python -m tools.config_docs`."""

from __future__ import annotations

import json
import typing
from collections.abc import Iterator
from typing import Any, Literal

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from app.cli.configuration import SERVE_OPTIONS
from app.config.serve import ServeConfig
from app.registry import OneOf
from tools.markdown import cell, table

INTRODUCTION = """# Configuration

Every option of `args:` in a Serve YAML (`configs/serve/` has examples), section by section. An unknown option is an
error that names it. The flag is that of `manta serve` and `manta config`, where the file has one model; the keywords of
`LLM(...)` are those of the engine. `manta config FILE` prints what holds, and where each value came from.
"""


def page() -> str:
    """The page's text."""
    flags = {
        ".".join(option.path).replace("models.0", "models[]"): option.flag
        for group in SERVE_OPTIONS.values()
        for option in group
    }
    out = [INTRODUCTION]
    for path, model in _sections(ServeConfig, ""):
        out += [f"\n## {f'`{path}`' if path else 'The application'}\n", (model.__doc__ or "").splitlines()[0], ""]
        out += table(("option", "type", "default", "flag", "meaning"), _rows(path, model, flags))
    return "\n".join(out) + "\n"


def _sections(model: type[BaseModel], path: str) -> Iterator[tuple[str, type[BaseModel]]]:
    """(where it stands, its class), of a class and all within it."""
    yield path, model
    for name, field in model.model_fields.items():
        for nested in _classes(field.annotation):
            is_list = typing.get_origin(field.annotation) is tuple
            yield from _sections(nested, f"{path}.{name}".lstrip(".") + ("[]" if is_list else ""))


def _classes(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in typing.get_args(annotation):
        yield from _classes(part)


def _rows(path: str, model: type[BaseModel], flags: dict[str, str]) -> Iterator[tuple[str, ...]]:
    for name, field in model.model_fields.items():
        flag = flags.get(f"{path}.{name}", "")
        nested = next(_classes(field.annotation), None)
        kind = "section" if nested else _type(field)
        about = field.description or (nested.__doc__ if nested else "") or ""
        yield f"`{name}`", cell(kind), _default(field, kind), flag and f"`{flag}`", cell(about.partition("\n")[0])


def _type(field: FieldInfo) -> str:
    """A field's type and bounds in a few words."""
    choices = list(dict.fromkeys(_choices((field.annotation, *field.metadata))))
    if choices:
        return ", ".join(f"`{choice}`" for choice in choices)
    bounds = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
    limits = [
        f" {sign} {getattr(each, name):g}"
        for each in (*field.metadata, *(m for part in typing.get_args(field.annotation) for m in _metadata(part)))
        for name, sign in bounds.items()
        if hasattr(each, name) and abs(getattr(each, name)) < 2**53
    ]
    return _name(field.annotation) + "".join(limits)


def _metadata(annotation: Any) -> tuple[Any, ...]:
    return tuple(getattr(annotation, "__metadata__", ()))


def _choices(parts: tuple[Any, ...]) -> Iterator[str]:
    """The words that a field takes, from its Literal types and its tables."""
    for part in parts:
        if isinstance(part, OneOf):
            yield from part.names
        elif typing.get_origin(part) is Literal:
            yield from map(str, typing.get_args(part))
        else:
            yield from _choices((*typing.get_args(part), *_metadata(part)))


def _name(annotation: Any) -> str:
    if _metadata(annotation):
        return _name(typing.get_args(annotation)[0])
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is tuple:
        return f"list of {_name(args[0])}"
    if origin is dict:
        return f"{_name(args[0])} to {_name(args[1])}"
    if args:
        return " or ".join(dict.fromkeys(_name(part) for part in args if part is not type(None)))
    return {str: "text", int: "integer", float: "number", bool: "true or false"}.get(annotation, str(annotation))


def _default(field: FieldInfo, kind: str) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    return "" if value is None or kind == "section" else f"`{json.dumps(value)}`"


if __name__ == "__main__":
    print(page(), end="")
