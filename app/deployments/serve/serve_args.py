"""Reads `args:` of the Serve application into ServeConfig, with errors that a reader of the YAML can act on."""

from __future__ import annotations

import typing
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from app.config.frozen import Frozen
from app.config.serve import ServeConfig
from app.errors import ConfigError
from app.registry import suggestion


def parse_args(args: Mapping[str, Any] | ServeConfig) -> ServeConfig:
    """The validated configuration. ConfigError names each option at fault, one a line, as a path into `args`."""
    if isinstance(args, ServeConfig):
        return args
    try:
        return ServeConfig.model_validate(dict(args))
    except ValidationError as error:
        raise _config_error(error) from None


def _config_error(error: ValidationError) -> ConfigError:
    details = error.errors(include_url=False)
    # A list with a wrong item is then also reported as too short: only the item is at fault.
    paths = [detail["loc"] for detail in details]
    lines = [_line(d) for d in details if not any(p != d["loc"] and p[: len(d["loc"])] == d["loc"] for p in paths)]
    return ConfigError("\n".join(lines), param=".".join(map(str, paths[0])) or None)


def _line(detail: ErrorDetails) -> str:
    path = ".".join(map(str, ("args", *detail["loc"])))
    if detail["type"] == "extra_forbidden":
        return f"{path}: no such option{_suggestion(detail['loc'])}"
    if detail["type"] == "missing":
        return f"{path}: this option is required"
    message = detail["msg"].removeprefix("Value error, ")
    if isinstance(detail["input"], Mapping | list | tuple):  # the reader has the section before them
        return f"{path}: {message}"
    return f"{path}: {message} (given: {detail['input']!r})"


def _suggestion(location: tuple[int | str, ...]) -> str:
    """The option that was meant, if one is spelled alike."""
    model: type[BaseModel] | None = ServeConfig
    for part in location[:-1]:
        if isinstance(part, str) and model is not None:
            model = _model_of(model, part)
    if model is None:
        return ""
    return f"; {suggestion(str(location[-1]), model.model_fields)}"


def _model_of(model: type[BaseModel], name: str) -> type[BaseModel] | None:
    """The section that an option holds, itself or as the items of a list."""
    field = model.model_fields.get(name)
    if field is None:
        return None
    for candidate in (field.annotation, *typing.get_args(field.annotation)):
        if isinstance(candidate, type) and issubclass(candidate, Frozen):
            return candidate
    return None
