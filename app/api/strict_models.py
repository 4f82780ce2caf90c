"""The base of what bodies consist of."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler, model_validator
from pydantic_core import CoreSchema

from app.bounds import MAX_NAME_CHARS, MAX_SENT_BACK_CHARS

_COLLECTIONS = ("list", "tuple", "set", "frozenset", "dict")


def _stop_early(schema: Any) -> None:
    """Mark every collection inside a core schema."""
    if isinstance(schema, dict):
        if schema.get("type") in _COLLECTIONS:
            schema["fail_fast"] = True
        for key, part in schema.items():
            if key not in ("metadata", "serialization"):
                _stop_early(part)
    elif isinstance(schema, list | tuple):
        for part in schema:
            _stop_early(part)


class FirstFault(BaseModel):
    """Stops at the first wrong entry of a list or an object: a body holds millions, each of which would be described
    at length, and one is named to the client anyway. A string is a name, unless its type says otherwise."""

    model_config = ConfigDict(str_max_length=MAX_NAME_CHARS)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema = handler(source)
        _stop_early(schema)
        return schema


class Frozen(FirstFault):
    """Immutable; null means not given."""

    model_config = ConfigDict(frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, data: Any) -> Any:
        return {name: value for name, value in data.items() if value is not None} if isinstance(data, dict) else data


class StrictModel(Frozen):
    """What the client asks for: an unknown field is refused by name."""

    model_config = ConfigDict(extra="forbid")


class History(Frozen):
    """What was said before. Clients send messages back as other servers and libraries decorated them
    (`provider_specific_fields`, `cache_control`, `tool_calls[].index`, ...): unknown fields are ignored."""

    model_config = ConfigDict(extra="ignore", str_max_length=MAX_SENT_BACK_CHARS)
