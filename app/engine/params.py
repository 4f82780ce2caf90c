"""What Python code passes by name: closed, immutable, and a misspelt name is told the one that was meant."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator

from app.errors import InvalidRequestError
from app.registry import suggestion


class Params(BaseModel):
    """Base of SamplingParams and its like. Raises InvalidRequestError for an unknown name; for a wrong value pydantic's
    ValidationError."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _no_unknown_name(cls, values: Any) -> Any:
        """Bodies of HTTP inherit the fields, but speak of unknown ones in their dialect's words."""
        unknown = [name for name in values if name not in cls.model_fields] if isinstance(values, dict) else []
        if unknown and cls.__base__ is Params:
            name = str(unknown[0])
            raise InvalidRequestError(
                f"{cls.__name__} has no parameter {name!r}; {suggestion(name, cls.model_fields)}", param=name
            )
        return values
