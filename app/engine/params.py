"""What Python code passes by name: closed, immutable, and a misspelt name is told the one that was meant."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationInfo, model_validator

from app.bounds import MAX_NAME_CHARS
from app.errors import InvalidRequestError
from app.registry import suggestion


class Params(BaseModel):
    """Base of SamplingParams and its like. Raises InvalidRequestError for an unknown name; for a wrong value pydantic's
    ValidationError."""

    model_config = ConfigDict(frozen=True, extra="forbid", str_max_length=MAX_NAME_CHARS)

    @model_validator(mode="before")
    @classmethod
    def _no_unknown_name(cls, values: Any, info: ValidationInfo) -> Any:
        """Only for Python's callers. Bodies of HTTP, which are read as JSON, inherit the fields or hold such an object:
        pydantic names the field at fault with its place in the body."""
        if info.mode != "python" or cls.__base__ is not Params or not isinstance(values, dict):
            return values
        unknown = [name for name in values if name not in cls.model_fields]
        if unknown:
            name = str(unknown[0])
            raise InvalidRequestError(
                f"{cls.__name__} has no parameter {name!r}; {suggestion(name, cls.model_fields)}", param=name
            )
        return values
