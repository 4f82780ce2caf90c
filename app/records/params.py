"""The base of what Python code passes by name: closed, immutable, and a misspelt name is told the one that was
meant."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, ValidationError, ValidationInfo, model_validator

from app.bounds import MAX_NAME_CHARS
from app.errors import InvalidRequestError, ParameterError
from app.registry import suggestion


class Params(BaseModel):
    """Base of SamplingParams and its like. Calling one raises InvalidRequestError for an unknown name, and for a wrong
    value ParameterError, which is one, and a ValueError as vLLM's is."""

    model_config = ConfigDict(frozen=True, extra="forbid", str_max_length=MAX_NAME_CHARS)

    if not TYPE_CHECKING:  # type checkers read the parameters off the fields

        def __init__(self, /, **values: Any) -> None:
            try:
                super().__init__(**values)
            except ValidationError as error:
                raise _in_a_line(error, values) from None

        __init__.__pydantic_base_init__ = True  # what is read as JSON does not come by here

    @model_validator(mode="before")
    @classmethod
    def _no_unknown_name(cls, values: Any, info: ValidationInfo) -> Any:
        """Only for Python's callers. Bodies of HTTP, which are read as JSON, inherit the fields or hold such an object:
        pydantic names the field at fault with its place in the body."""
        if info.mode != "python" or cls.__base__ is not Params or not isinstance(values, dict):
            return values
        if not values.keys() <= cls.model_fields.keys():
            name = str(next(name for name in values if name not in cls.model_fields))
            raise InvalidRequestError(
                f"{cls.__name__} has no parameter {name!r}; {suggestion(name, cls.model_fields)}", param=name
            )
        return values


def _in_a_line(error: ValidationError, values: dict[str, Any]) -> ParameterError:
    """Names the first parameter at fault, and what was given."""
    first = error.errors(include_url=False, include_input=False)[0]
    name = ".".join(map(str, first["loc"]))
    reason = first["msg"].removeprefix("Value error, ")
    given = f", not {values[name]!r:.80}" if name in values and first["type"] != "value_error" else ""
    return ParameterError(f"{name}: {reason}{given}" if name else reason, param=name or None)
